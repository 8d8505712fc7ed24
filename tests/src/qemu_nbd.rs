//! qemu-nbd, which holds an image as QEMU does.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use walvisor_testkit::{Process, wait_until};

/// A running qemu-nbd. Dropping it ends it.
pub struct QemuNbd {
    _child: Process,
}

impl QemuNbd {
    /// Starts qemu-nbd in `dir`, for the raw image and with the options that `arguments` names, and
    /// waits until it greets clients at the socket `q`. By then it has opened the image.
    #[track_caller]
    #[must_use]
    pub fn start(dir: &Path, arguments: &str) -> Self {
        let socket = dir.join("q");
        let mut command = Command::new("qemu-nbd");
        command
            .args(["--format=raw", "--persistent", "--socket"])
            .arg(&socket)
            .args(arguments.split_whitespace())
            .current_dir(dir)
            .stdin(Stdio::null())
            // It would report the greeting's end.
            .stderr(Stdio::null());
        let mut child = Process::spawn(&mut command);
        wait_until("qemu-nbd's greeting", || {
            let mut greeting = [0; 8];
            let greeted = UnixStream::connect(&socket)
                .and_then(|mut stream| stream.read_exact(&mut greeting));
            let ended = child.try_wait().expect("its status");
            assert!(ended.is_none(), "qemu-nbd {arguments}: {ended:?}");
            greeted.is_ok() && &greeting == b"NBDMAGIC"
        });
        Self { _child: child }
    }
}
