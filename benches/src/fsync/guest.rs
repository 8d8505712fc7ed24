//! The disks of guests: QEMU's own, walvisor's over vhost-user, and those of user-mode Linux, whose
//! kernel may have a cache of its own over them. A guest of the same kind looks at what a power cut
//! has left.

use std::io::Write;
use std::path::Path;
use std::process::ChildStdin;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::guest::vhost_user_disk;
use walvisor_guest_images::{Cache, Guest, GuestImages, Reporter, UserMode};
use walvisor_tests::medium_fs::MediumFs;

use super::{CLIENTS, DISKS, ServedDisks, Way, cuts, record};
use crate::bench::Side;
use crate::bench_dirs::directory;

/// How long a sync of the medium takes while the clients never pause.
const BUSY_SYNC: Duration = Duration::from_millis(1);
const SCRIPT: &str = include_str!("../../scripts/fsync-guest.sh");

/// A guest with the disks of a way.
struct RunningGuest {
    guest: Guest,
    input: ChildStdin,
    _dir: TempDir,
    // Ends after the guest.
    _served: Option<ServedDisks>,
}

impl RunningGuest {
    /// Boots it with the disks in `images`.
    fn boot(way: &Way, images: &Path, task: &str) -> Result<Self, CommandError> {
        let side = way.side;
        let dir = directory(&std::env::temp_dir())?;
        let is_walvisor = !side.text("spec").is_empty();
        let served = is_walvisor.then(|| way.serve("vhost-user", images));
        let served = served.transpose()?;
        let sockets = served.iter().flat_map(|served| &served.sockets);
        let script = |console: &str| {
            format!(
                "DISKS='{}' COMMITS={} BUSY='{}' TASK={task} CONSOLE={console}\n{}\n{SCRIPT}",
                side.text("disks"),
                way.commits(),
                busy_seconds(side).map_or_else(String::new, |seconds| seconds.to_string()),
                side.text("setup"),
            )
        };
        let guest = if side.text("guest") == "linux.uml" {
            let files = side.text("files").split_whitespace();
            let modules = side.text("modules").split_whitespace();
            let guest = UserMode {
                disks: sockets.cloned().collect(),
                files: files.map(|file| images.join(file)).collect(),
                modules: modules.map(str::to_owned).collect(),
                ..UserMode::default()
            };
            guest.boot_here(dir.path(), &script("/dev/tty0"))
        } else {
            let cache = Cache::open(None).map_err(CommandError::failed)?;
            let own = GuestImages::ensure(&cache, &Reporter::quiet(None));
            let own = own.map_err(CommandError::failed)?;
            let drives = (0..DISKS).filter(|_| !is_walvisor).flat_map(|disk| {
                let image = images.join(format!("raw-{disk}.img"));
                let image = image.display();
                let options = side.text("drive");
                [
                    "-drive".to_owned(),
                    format!("if=none,id=d{disk},format=raw,file={image},{options}"),
                    "-device".to_owned(),
                    format!("virtio-blk-pci,drive=d{disk}"),
                ]
            });
            let sockets = sockets.enumerate();
            let sockets = sockets.flat_map(|(disk, socket)| vhost_user_disk(disk, socket, 1));
            let arguments: Vec<String> = drives.chain(sockets).collect();
            Guest::qemu(dir.path(), &own, &arguments, &script("/dev/ttyS0"))
        };
        let mut guest = guest.map_err(CommandError::failed)?;
        let input = guest.input();
        let input = input.ok_or_else(|| CommandError::Failed("a guest has no input".to_owned()))?;
        Ok(Self {
            guest,
            input,
            _dir: dir,
            _served: served,
        })
    }

    /// Waits until the guest has come to a step.
    fn reach(&mut self, step: &str) -> Result<String, CommandError> {
        let line = self.guest.wait_for("guest: ");
        let line = line.map_err(CommandError::failed)?;
        if line.starts_with(&format!("guest: {step}")) {
            return Ok(line);
        }
        Err(CommandError::Failed(format!("instead of {step}: {line}")))
    }

    fn go_on(&mut self) -> Result<(), CommandError> {
        self.input.write_all(b"\n").map_err(CommandError::failed)
    }
}

/// For how long the guest's clients commit without a pause, in a guest that is not emulated.
fn busy_seconds(side: &Side) -> Option<u64> {
    (!side.text("busy").is_empty()).then(|| side.number("seconds"))
}

/// All figures of a way in a guest.
pub fn measure(way: &Way) -> Result<Value, CommandError> {
    let (medium, commits) = (way.volume.medium(), way.commits());
    let mut guest = RunningGuest::boot(way, &way.volume.top(), "work")?;
    guest.reach("ready")?;
    let ready = medium.syncs();
    guest.go_on()?;
    guest.reach("alone")?;
    let alone = medium.syncs();
    guest.go_on()?;
    guest.reach("together")?;
    let together = medium.syncs();
    let (mut commits_per_s, mut per_flush_busy) = (None, None);
    if let Some(seconds) = busy_seconds(way.side) {
        medium.set_sync_time(BUSY_SYNC);
        guest.go_on()?;
        let busy = guest.reach("busy")?;
        medium.set_sync_time(Duration::ZERO);
        let count = busy
            .rsplit(' ')
            .next()
            .and_then(|count| count.trim().parse::<f64>().ok());
        let count = count.ok_or_else(|| CommandError::Failed(format!("a guest: {busy}")))?;
        commits_per_s = Some(count / seconds as f64);
        per_flush_busy = Some((medium.syncs() - together) as f64 / count);
    }
    record(&way.volume)?;
    guest.go_on()?;
    guest.reach("cut")?;
    let last = medium.recorded();
    let committed = medium.end_recording();
    record(&way.volume)?;
    guest.go_on()?;
    guest.reach("torn")?;
    way.volume.sync().map_err(CommandError::failed)?;
    let pages = medium.end_recording();
    drop(guest);
    let left = MediumFs::from_image(|path| committed.lose_unsynced(last, path));
    let (lost, _) = look(way, &left.map_err(CommandError::Failed)?)?;
    let mut torn = 0;
    for (at, bytes) in cuts(way.side, &pages) {
        let left = MediumFs::from_image(|path| pages.tear(at, bytes, path));
        torn += look(way, &left.map_err(CommandError::Failed)?)?.1;
    }
    let all = commits / 5 * (DISKS * CLIENTS) as u64;
    Ok(json!({
        "per_flush_alone": (alone - ready) as f64 / commits as f64,
        "per_flush_together": (together - alone) as f64 / all as f64,
        "per_flush_busy": per_flush_busy,
        "commits_per_s": commits_per_s,
        "lost_by_cut": lost,
        "torn": torn,
    }))
}

/// What a guest finds on a volume: the number of lost commits, and 1 if a page is torn.
fn look(way: &Way, volume: &MediumFs) -> Result<(u64, u64), CommandError> {
    let mut guest = RunningGuest::boot(way, &volume.top(), "check")?;
    let found = guest.reach("found")?;
    let numbers = found
        .split_whitespace()
        .filter_map(|word| word.parse().ok());
    match numbers.collect::<Vec<u64>>()[..] {
        [lost, torn] => Ok((lost, torn)),
        _ => Err(CommandError::Failed(format!("a guest: {found}"))),
    }
}
