//! Output for the user who waits for a build or a job.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Prints notes, the job's console and a progress line.
///
/// Notes go to standard error. The progress line appears only on a terminal.
pub struct Reporter {
    line: ProgressBar,
    stream: bool,
    log: Option<File>,
}

impl Reporter {
    /// Streams the job's console to standard output.
    #[must_use]
    pub fn streaming() -> Self {
        Self::new(true, None)
    }

    /// Shows only notes and the progress line; the console goes to `log`.
    #[must_use]
    pub fn quiet(log: Option<File>) -> Self {
        Self::new(false, log)
    }

    fn new(stream: bool, log: Option<File>) -> Self {
        let line = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}") {
            line.set_style(style);
        }
        line.enable_steady_tick(Duration::from_millis(200));
        Self { line, stream, log }
    }

    /// Prints one line to standard error.
    pub fn note(&self, text: &str) {
        self.line.suspend(|| eprintln!("{text}"));
    }

    /// Replaces the progress line.
    pub fn progress(&self, text: &str) {
        self.line.set_message(text.to_owned());
    }

    /// Removes the progress line for good: from now on the guest has the terminal.
    pub fn clear(&self) {
        self.line.finish_and_clear();
    }

    /// Takes one line of the job's console.
    pub fn console(&self, text: &str) {
        if let Some(mut log) = self.log.as_ref() {
            // The log is only a convenience, so a failed write does not fail the job.
            let _ = writeln!(log, "{text}");
        }
        if self.stream {
            self.line.suspend(|| println!("{text}"));
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.clear();
    }
}
