//! The largest disk that Linux can address: its last sector ends at the limit of signed 64-bit
//! offsets.

use std::fs::File;

use super::{serve, succeed, user_mode};
use walvisor_tests::{have, images};

const LARGEST: u64 = (1 << 63) - 512;

const SCRIPT: &str = "
sectors=$(cat /sys/block/vda/size)
echo guest: sectors $sectors
last=$((sectors - 8))
yes 'the end' | head -c 4096 | dd of=/dev/vda bs=512 seek=$last oflag=direct conv=fsync 2>/dev/null
echo guest: wrote $?
echo 3 >/proc/sys/vm/drop_caches
echo guest: read $(dd if=/dev/vda bs=512 skip=$last iflag=direct 2>/dev/null | head -n 1) \
    $(dd if=/dev/vda bs=512 skip=$last iflag=direct 2>/dev/null | wc -c)
";

#[test]
fn linux_uses_the_last_sector_of_the_largest_disk() {
    if !have("linux.uml", "user-mode-linux") {
        return;
    }
    // tmpfs holds files of any length.
    let roomy = tempfile::tempdir_in("/dev/shm").and_then(|dir| {
        File::create(dir.path().join("probe"))?.set_len(LARGEST)?;
        Ok(dir)
    });
    let roomy = match roomy {
        Ok(roomy) => roomy,
        Err(error) => {
            println!("skipped: /dev/shm holds no file of {LARGEST} bytes: {error}");
            return;
        }
    };
    let (dir, images) = (tempfile::tempdir().unwrap(), images());
    succeed(
        roomy.path(),
        &format!("disk create disk.img --size {LARGEST}"),
    );
    let daemon = serve(roomy.path(), "--disk path=disk.img,socket=s");
    let socket = roomy.path().join("s");
    let mut guest = user_mode(&socket)
        .boot(dir.path(), &images, SCRIPT)
        .unwrap();
    let sectors = LARGEST / 512;
    assert_eq!(
        guest.wait_for("guest: sectors").unwrap(),
        format!("guest: sectors {sectors}")
    );
    assert_eq!(guest.wait_for("guest: wrote").unwrap(), "guest: wrote 0");
    assert_eq!(
        guest.wait_for("guest: read").unwrap(),
        "guest: read the end 4096"
    );
    guest.wait_for("guest: end").unwrap();
    guest.end().unwrap();
    daemon.stop();
    succeed(roomy.path(), "disk check disk.img");
}
