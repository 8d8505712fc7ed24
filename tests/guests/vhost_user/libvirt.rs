//! A domain of libvirt's own daemon on a pool: disks come and go, snapshots and backups are made,
//! and everything is killed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor_guest_images::{Guest, Libvirt};
use walvisor_testkit::process::client;
use walvisor_testkit::{Daemon, give, wait_until};
use walvisor_tests::{binary, have_all, images, succeed};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");

/// The guest counts on its first disk, and says each number once it is synced. A second disk that
/// comes gets a file system, and goes when the host says so.
const COUNT: &str = "mount -t ext4 /dev/vda /mnt 2>/dev/null || { mkfs.ext4 -q /dev/vda; mount -t ext4 /dev/vda /mnt; }
n=$(cat /mnt/count 2>/dev/null || echo 0)
echo guest: begins at $n
while true; do
    n=$((n + 1))
    echo $n >/mnt/new && sync && mv /mnt/new /mnt/count && sync && echo guest: count $n
    if [ -b /dev/vdb ] && [ ! -e /run/second ]; then
        mkfs.ext4 -q /dev/vdb && mkdir -p /second && mount -t ext4 /dev/vdb /second && echo of vdb >/second/file &&
            umount /second && sync && touch /run/second && echo guest: second disk written
    elif [ ! -b /dev/vdb ] && [ -e /run/second ]; then
        rm /run/second; echo guest: second disk gone
    fi
    sleep 0.2
done";

/// A pool as its unit starts it, with other directories.
struct Pool {
    dir: PathBuf,
}

impl Pool {
    /// The file at a place of the unit.
    fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// A page's text with the pool's own directories.
    fn page(&self, name: &str) -> String {
        let text = fs::read_to_string(Path::new(DOCS).join(name)).unwrap();
        self.places(&text)
    }

    fn places(&self, text: &str) -> String {
        let place = self.dir.display();
        ["/var/lib/walvisor", "/run/walvisor", "/etc/walvisor"]
            .iter()
            .fold(text.to_owned(), |text, at| {
                text.replace(at, &format!("{place}{at}"))
            })
    }

    /// Starts the daemon with the command of the unit, and waits until it serves so many disks.
    fn start(&self, disks: usize) -> Daemon {
        let unit = self
            .page("operations/walvisor@.service")
            .replace("%i", "pool");
        let start = unit
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="));
        let mut words = start.unwrap().split(' ');
        assert_eq!(words.next(), Some("/usr/local/bin/walvisor"));
        let mut command = Command::new(binary());
        command.args(words).stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            command.args(["--user", &Libvirt::USER.to_string()]);
        }
        Daemon::start_telling(&self.dir, &mut command, Stdio::inherit(), disks)
    }

    fn ctl(&self, words: &str) -> String {
        let socket = self.path("/run/walvisor/pool/ctl");
        succeed(&self.dir, &format!("ctl {} {words}", socket.display()))
    }
}

/// Gives files to the user of the domain.
fn give_to_domain(paths: &[PathBuf]) {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    paths.iter().for_each(|path| give(path, Libvirt::USER));
}

/// Waits for a line that begins with `start`, while the guest counts. Returns the number at its
/// end, if it has one.
fn wait_for(guest: &mut Guest, start: &str) -> Option<u64> {
    // Minutes.
    for _ in 0..300 {
        let line = guest.line().unwrap().expect("a line");
        if line.starts_with(start) {
            return line.rsplit(' ').next()?.trim().parse().ok();
        }
    }
    panic!("no {start:?}: {}", guest.console());
}

/// The number that the guest tells next.
fn count(guest: &mut Guest) -> u64 {
    wait_for(guest, "guest: count ").expect("a number")
}

#[test]
fn a_domain_of_libvirts_daemon_on_a_pool_keeps_what_it_was_told() {
    let needs = [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("libvirtd", "libvirt-daemon"),
        ("virt-qemu-run", "libvirt-daemon-driver-qemu"),
        ("virsh", "libvirt-clients"),
        ("debugfs", "e2fsprogs"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // The domain belongs to another user.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let pool = Pool {
        dir: dir.path().to_owned(),
    };
    let (data, run) = (
        pool.path("/var/lib/walvisor"),
        pool.path("/run/walvisor/pool"),
    );
    for place in [&data, &run, &pool.path("/etc/walvisor")] {
        fs::create_dir_all(place).unwrap();
    }
    let file = pool.path("/etc/walvisor/pool.toml");
    fs::write(
        &file,
        pool.places(
            "[defaults]\ndoor = \"vhost-user\"\nlog = \"/var/lib/walvisor/pool.wal\"\n\n\
             [[disk]]\npath = \"/var/lib/walvisor/a.img\"\nsocket = \"/run/walvisor/pool/a.sock\"\nqueues = 2\n",
        ),
    )
    .unwrap();
    for disk in ["a", "b"] {
        let words =
            "disk create /var/lib/walvisor/x.img --size 64M --log /var/lib/walvisor/pool.wal";
        let _ = succeed(
            dir.path(),
            &pool.places(&words.replace("x.img", &format!("{disk}.img"))),
        );
    }
    give_to_domain(&[data.clone(), run.clone(), pool.path("/etc/walvisor")]);

    let mut daemon = pool.start(1);
    let home = dir.path().join("libvirt");
    fs::create_dir(&home).unwrap();
    let libvirt = Libvirt::start(&home).unwrap();
    let domain = pool.page("vhost-user/libvirt-domain.xml");
    let domain = domain.replace("/run/walvisor/vm.sock", "/run/walvisor/pool/a.sock");
    libvirt.define(&domain, &images(), COUNT).unwrap();
    const NAME: &str = "walvisor-vhost-user";
    let mut guest = libvirt.start_domain(NAME).unwrap();
    assert_eq!(wait_for(&mut guest, "guest: begins at"), Some(0));
    count(&mut guest);

    // A second disk comes, and goes.
    let added = "add-disk path=/var/lib/walvisor/b.img,log=/var/lib/walvisor/pool.wal,door=vhost-user,\
                 socket=/run/walvisor/pool/b.sock";
    let _ = pool.ctl(&pool.places(added));
    let disk = home.join("disk.xml");
    fs::write(&disk, pool.page("vhost-user/libvirt-disk.xml")).unwrap();
    let device = |verb: &str| libvirt.virsh(&[verb, NAME, "disk.xml", "--live"]).unwrap();
    device("attach-device");
    wait_for(&mut guest, "guest: second disk written");
    device("detach-device");
    wait_for(&mut guest, "guest: second disk gone");
    wait_until("the end of the second disk", || {
        !libvirt
            .virsh(&["domblklist", NAME])
            .unwrap()
            .contains("vdb")
    });
    let _ = pool.ctl("remove-disk b.img");
    let second = client(&data, "debugfs", &["-R", "cat /file", "b.img"]);
    assert_eq!(second, "of vdb\n");

    // A snapshot and a backup beside the writing guest.
    let before = count(&mut guest);
    let _ = pool.ctl("snapshot evening");
    let _ = pool.ctl("export --disk a.img -o backup.img");
    let saved = client(dir.path(), "debugfs", &["-R", "cat /count", "backup.img"]);
    let saved = saved.trim().parse::<u64>().unwrap();
    assert!(saved >= before, "{saved} of {before}");

    // The daemon is killed, and the domain goes on.
    for _ in 0..2 {
        // QEMU 7.2 waits for ever if a daemon dies while the two shake hands.
        guest.take_lines();
        count(&mut guest);
        count(&mut guest);
        daemon.kill();
        daemon = pool.start(1);
    }
    guest.take_lines();
    let mut told = count(&mut guest);
    told = told.max(count(&mut guest));

    // Everything is killed, and what the guest has told is there.
    drop(libvirt);
    for line in guest.kill() {
        let number = line
            .strip_prefix("guest: count ")
            .and_then(|number| number.trim().parse().ok());
        told = told.max(number.unwrap_or(0));
    }
    daemon.kill();
    let daemon = pool.start(1);
    let libvirt = Libvirt::start(&home).unwrap();
    let mut guest = libvirt.start_domain(NAME).unwrap();
    let began = wait_for(&mut guest, "guest: begins at ").unwrap();
    assert!(began >= told, "{began} of {told}");
    assert!(count(&mut guest) > told);
    assert!(pool.ctl("snapshots").contains("evening"));
    libvirt.virsh(&["destroy", NAME]).unwrap();
    drop(libvirt);
    daemon.stop();
    let _ = succeed(&data, "disk check a.img --log pool.wal");
    println!("counted to {told}, with two kills of the daemon and one of all");
}
