//! qemu-nbd, which holds an image as QEMU does.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use walvisor_guest_images::leash;

/// A running qemu-nbd. Dropping it ends it.
pub struct QemuNbd {
    child: Child,
}

impl QemuNbd {
    /// Starts qemu-nbd in `dir`, for the raw image and with the options that `arguments` names, and waits until it greets
    /// clients at the socket `q`. By then it has opened the image.
    ///
    /// # Panics
    /// qemu-nbd ends, or does not greet within a minute.
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
        let child = leash(&mut command).spawn().expect("qemu-nbd starts");
        let mut server = Self { child };
        let began = Instant::now();
        loop {
            let mut greeting = [0; 8];
            let greeted = UnixStream::connect(&socket)
                .and_then(|mut stream| stream.read_exact(&mut greeting));
            if greeted.is_ok() && &greeting == b"NBDMAGIC" {
                return server;
            }
            let ended = server.child.try_wait().expect("its status");
            assert!(ended.is_none(), "qemu-nbd {arguments}: {ended:?}");
            assert!(began.elapsed() < Duration::from_secs(60), "no greeting");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
