//! `walvisor-guest-images`: builds Linux guest images, and runs jobs with them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use walvisor_guest_images::{
    Cache, Error, Guest, GuestImages, GuestJob, Machine, NewerKernel, OwnGuest, Reporter, Result,
    UserMode, demo, guest::END, install_missing, sibling_or_built, stop,
};

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// Where built images are kept [default: $WALVISOR_CACHE, $XDG_CACHE_HOME/walvisor,
    /// ~/.cache/walvisor]
    #[arg(long, global = true)]
    cache: Option<PathBuf>,
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Boots your own root image with Debian's kernel, its disk on a log: with `walvisor run` here,
    /// or nested where this machine's KVM runs no kernel. On a terminal Ctrl-A x ends the guest
    Boot {
        /// The raw image: an ext4 root file system, or a disk with one on a partition
        image: PathBuf,
        /// The device with the root file system
        #[arg(long, default_value = "/dev/vda")]
        root: String,
        /// Further words of the kernel's command line, such as init=/bin/bash
        #[arg(long, default_value = "")]
        append: String,
        /// Virtual CPUs
        #[arg(long, default_value_t = 1)]
        cpus: u8,
        /// Guest memory
        #[arg(long, default_value = "512M")]
        memory: String,
        /// A further disk, as 'walvisor run --disk' takes it; where the guest is nested, as
        /// 'walvisor serve vhost-user' does, without socket=; may be given several times
        #[arg(long = "disk", value_name = "SPEC")]
        disks: Vec<String>,
        /// A network, as 'walvisor run --net' takes it; where the guest is nested, only passt
        #[arg(long = "net", value_name = "SPEC")]
        network: Option<String>,
        /// Listen here for 'walvisor ctl'; where the guest is nested, the daemon of its disks does,
        /// which knows nothing of the guest
        #[arg(long, value_name = "SOCKET")]
        control: Option<PathBuf>,
        /// Write metrics as Prometheus text at the end
        #[arg(long, value_name = "FILE")]
        metrics: Option<PathBuf>,
        /// Serve metrics over HTTP at unix:PATH or IP:PORT
        #[arg(long, value_name = "ADDRESS")]
        metrics_listen: Option<String>,
        /// The walvisor binary [default: beside this program, or built from this source tree]
        #[arg(long)]
        walvisor: Option<PathBuf>,
    },
    /// Builds the images if they are missing or out of date, and prints their directory
    Build,
    /// Runs a shell script on a machine whose KVM can run Linux; ends with its exit status
    Run {
        /// The script; the top of guest-images/scripts/run.sh says what it may use
        script: PathBuf,
        /// Further files, which the script finds in $JOB
        files: Vec<PathBuf>,
        /// The walvisor binary [default: beside this program, or built from this source tree]
        #[arg(long)]
        walvisor: Option<PathBuf>,
        /// Copies what the script put into $RESULTS into this directory
        #[arg(long)]
        results: Option<PathBuf>,
        /// Kills the job after this many seconds
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// On an emulated machine with Debian's newer kernel
        #[arg(long)]
        newer_kernel: bool,
    },
    /// Runs a shell script in user-mode Linux; stdin is typed on its console
    UserMode {
        /// The script
        script: PathBuf,
        /// A module to load, with its dependencies; may be given several times
        #[arg(long = "module", value_name = "NAME")]
        modules: Vec<String>,
        /// The socket of a vhost-user disk: /dev/vda, then /dev/vdb, ...; may be given several
        /// times
        #[arg(long = "disk", value_name = "SOCKET")]
        disks: Vec<PathBuf>,
        /// With the files of this machine, read-only, in place of busybox, e2fsprogs and fio in its
        /// memory
        #[arg(long)]
        files_of_this_machine: bool,
    },
    /// Runs a shell script in a Debian guest that QEMU emulates, with busybox, e2fsprogs and fio
    Emulated {
        /// The script
        script: PathBuf,
        /// Further arguments for QEMU: disks, for instance, of which the first is /dev/vda;
        /// vhost-user works too
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// The embedded guest, then a Debian guest that runs fio on two write-ahead-logged disks, and a
    /// table
    Demo {
        /// The walvisor binary [default: beside this program, or built from this source tree]
        #[arg(long)]
        walvisor: Option<PathBuf>,
        /// Where fio's JSON, the metrics and the console are kept
        #[arg(long, default_value = "target/demo")]
        output: PathBuf,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = stop::end_children_first()
        .map_err(|error| Error::Unusable(format!("cannot wait for signals: {error}")))
        .and_then(|()| run_action(arguments));
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("walvisor-guest-images: {error}");
            match error {
                Error::Stopped { signal } => ExitCode::from(128_u8.saturating_add(signal as u8)),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run_action(arguments: Arguments) -> Result<u8> {
    let cache = Cache::open(arguments.cache)?;
    match arguments.command {
        Action::Boot {
            image,
            root,
            append,
            cpus,
            memory,
            disks,
            network,
            control,
            metrics,
            metrics_listen,
            walvisor,
        } => {
            let guest = OwnGuest {
                image,
                root,
                append,
                cpus,
                memory,
                disks,
                network,
                control,
                metrics,
                metrics_listen,
            };
            guest.boot(&binary(walvisor)?, &cache)
        }
        Action::Build => {
            let images = GuestImages::ensure(&cache, &Reporter::quiet(None))?;
            println!("{}", images.directory.display());
            Ok(0)
        }
        Action::Run {
            script,
            files,
            walvisor,
            results,
            seconds,
            newer_kernel,
        } => {
            let mut job = GuestJob::new(read(&script)?, binary(walvisor)?);
            let reporter = Reporter::streaming();
            job.limit = Duration::from_secs(seconds);
            for file in files {
                let name = file
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                job = job.file(name, fs::read(&file).map_err(read_error(&file))?);
            }
            job.kernel = newer_kernel.then_some(NewerKernel::V6_12);
            let outcome = if newer_kernel {
                job.run_on(Machine::Nested, &cache, &reporter)?
            } else {
                job.run(&cache, &reporter)?
            };
            if let Some(target) = results {
                outcome.keep_results(&target)?;
            }
            if outcome.hung_boots > 0 {
                reporter.note(&format!(
                    "attempts given up because a guest hung or crashed: {}",
                    outcome.hung_boots
                ));
            }
            Ok(u8::try_from(outcome.status).unwrap_or(1))
        }
        Action::UserMode {
            script,
            modules,
            disks,
            files_of_this_machine,
        } => {
            let disks: Result<_> = disks.iter().map(|disk| absolute(disk)).collect();
            let disks = disks?;
            let guest = UserMode {
                disks,
                modules,
                ..UserMode::default()
            };
            user_mode(&cache, &guest, &read(&script)?, files_of_this_machine)
        }
        Action::Emulated { script, arguments } => run_emulated(&cache, &read(&script)?, &arguments),
        Action::Demo { walvisor, output } => demo(&cache, &binary(walvisor)?, &output).map(|()| 0),
    }
}

/// Streams the console of a guest in user-mode Linux until its end.
fn user_mode(cache: &Cache, guest: &UserMode, script: &str, here: bool) -> Result<u8> {
    let reporter = Reporter::streaming();
    UserMode::install(&reporter)?;
    let directory = create_directory()?;
    let mut guest = if here {
        guest.boot_here(directory.path(), script)?
    } else {
        let images = GuestImages::ensure(cache, &reporter)?;
        guest.boot(directory.path(), &images, script)?
    };
    if let Some(mut input) = guest.input() {
        std::thread::spawn(move || {
            // The copy ends when stdin or the guest ends. Then the input is leaked, because
            // dropping it would hang the console up.
            let _ = std::io::copy(&mut std::io::stdin(), &mut input);
            std::mem::forget(input);
        });
    }
    stream(guest, &reporter)
}

/// Streams the console of an emulated guest until its end.
fn run_emulated(cache: &Cache, script: &str, arguments: &[String]) -> Result<u8> {
    let reporter = Reporter::streaming();
    install_missing(&[("qemu-system-x86_64", "qemu-system-x86")], &reporter)?;
    let images = GuestImages::ensure(cache, &reporter)?;
    let directory = create_directory()?;
    let guest = Guest::qemu(directory.path(), &images, arguments, script)?;
    stream(guest, &reporter)
}

fn create_directory() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|source| Error::File {
        action: "create a directory in",
        path: std::env::temp_dir(),
        source,
    })
}

fn stream(mut guest: Guest, reporter: &Reporter) -> Result<u8> {
    let mut ended = false;
    while let Some(line) = guest.line()? {
        ended |= line == END;
        reporter.console(&line);
    }
    guest.end()?;
    if !ended {
        return Err(Error::Unusable(
            "the guest ended before its script: its console shows how far it got".to_owned(),
        ));
    }
    Ok(0)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "find",
        path: path.to_owned(),
        source,
    })
}

/// The binary given on the command line, or else the one that belongs to this program.
fn binary(given: Option<PathBuf>) -> Result<PathBuf> {
    given.map_or_else(|| sibling_or_built(&Reporter::quiet(None)), Ok)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(read_error(path))
}

fn read_error(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    }
}
