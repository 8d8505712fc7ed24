//! What serves the disks of a side, as its matrix says: a daemon of walvisor with a SPEC for each
//! disk, or a peer on the raw images.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor::commands::CommandError;

use crate::bench::{Side, fill};
use crate::daemon::Daemon;

/// Serves a side's disks in `images` through `door`, each at its socket. The setting `spec` is the
/// SPEC of a disk of walvisor, a template that knows `disk`, and `options` are more options of its
/// daemon, whose control socket is in `control`. A side without is a peer: qemu-nbd with the
/// setting `cache`, a daemon for each disk, or qemu-storage-daemon, with `peer_queues` for each
/// disk, and `peer_bytes` of address space if that is limited.
///
/// # Errors
/// If a daemon does not start.
pub fn serve(
    side: &Side,
    door: &str,
    images: &Path,
    control: &Path,
    sockets: &[PathBuf],
) -> Result<Vec<Daemon>, CommandError> {
    for socket in sockets {
        // An earlier daemon may have left it.
        let _ = std::fs::remove_file(socket);
    }
    let spec = side.text("spec");
    if !spec.is_empty() {
        let specs = sockets.iter().enumerate().map(|(disk, socket)| {
            let mut settings = side.plan.clone();
            settings.insert("disk".to_owned(), disk.into());
            format!("{},socket={}", fill(spec, &settings), socket.display())
        });
        let specs: Vec<String> = specs.collect();
        let options: Vec<&str> = side.text("options").split_whitespace().collect();
        let daemon = Daemon::start_with(door, &options, &specs, images, control)?;
        return Ok(vec![daemon]);
    }
    if side.side.starts_with("qemu-nbd") {
        // Before the comma: the rest is how every qemu-nbd opens its image.
        let cache = side.text("cache").split(',').next().unwrap_or_default();
        let daemons = sockets.iter().enumerate().map(|(disk, socket)| {
            let image = format!("raw-{disk}.img");
            Daemon::qemu_nbd(images, &image, socket, cache)
        });
        return daemons.collect();
    }
    let mut command = Command::new(&side.side);
    if side.number("peer_bytes") > 0 {
        command = Command::new("prlimit");
        command
            .arg(format!("--as={}", side.number("peer_bytes")))
            .arg(&side.side);
        // It tells of each attacker.
        command.stderr(Stdio::null());
    }
    let queues = side.number("peer_queues") as usize;
    Ok(vec![Daemon::storage_daemon(
        &mut command,
        door,
        queues,
        images,
        sockets,
    )?])
}
