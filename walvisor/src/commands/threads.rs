//! The number of threads for long work.

use std::num::NonZeroUsize;

use clap::Args;

/// The option `--threads`.
#[derive(Args, Clone, Copy, Debug)]
pub struct Threads {
    /// Number of threads [default: number of processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
}

impl Threads {
    /// The number of threads; `None` means as many as there are processors.
    pub fn get(self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.threads?.into())
    }
}
