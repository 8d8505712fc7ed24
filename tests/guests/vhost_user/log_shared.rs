//! Two guests on one log: one sync serves flushes of both.

use std::fs;
use std::path::Path;

use walvisor_guest_images::{Guest, GuestImages};

use super::{serve, succeed, user_mode};
use walvisor_tests::{have, images};

/// Each write waits for its FLUSH, and the guest's kernel has no other FLUSH to merge it with. The
/// storm is long enough for the guests to overlap, even if one of them starts much later.
const STORM: &str = "
echo guest: ready
fio --name=storm --filename=/dev/vda --rw=randwrite --bs=4k --size=16M --time_based --runtime=10 --fdatasync=1 --minimal >/dev/null
echo guest: fio $?
";

#[test]
fn two_guests_on_one_log_need_fewer_syncs_for_a_flush_than_one() {
    if !have("linux.uml", "user-mode-linux") {
        return;
    }
    let images = images();
    let alone = syncs_per_flush(&images, &["a"]);
    let together = syncs_per_flush(&images, &["a", "b"]);
    println!("syncs per flush: alone {alone:.3}, two guests {together:.3}");
    assert!(together < alone, "alone {alone}, two guests {together}");
}

fn syncs_per_flush(images: &GuestImages, disks: &[&str]) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut arguments = "--metrics metrics.txt".to_owned();
    for disk in disks {
        succeed(dir, &format!("disk create {disk}.img --size 32M --log log"));
        // A commit group waits for other disks that are open. Otherwise, on a fast medium, FLUSHes
        // of two guests would rarely meet.
        arguments.push_str(&format!(
            " --disk path={disk}.img,log=log,socket={disk}.sock,queues=1,commit-wait-usec=20000"
        ));
    }
    let daemon = serve(dir, &arguments);
    let mut guests: Vec<Guest> = disks
        .iter()
        .map(|disk| {
            let own = dir.join(disk);
            fs::create_dir(&own).unwrap();
            let socket = dir.join(format!("{disk}.sock"));
            user_mode(&socket).boot(&own, images, STORM).unwrap()
        })
        .collect();
    for guest in &mut guests {
        guest.wait_for("guest: ready").unwrap();
    }
    for guest in &mut guests {
        assert_eq!(guest.wait_for("guest: fio").unwrap(), "guest: fio 0");
    }
    for guest in guests {
        guest.end().unwrap();
    }
    daemon.stop();
    let metrics = fs::read_to_string(Path::new(dir).join("metrics.txt")).unwrap();
    metric(&metrics, "walvisor_log_syncs_total") / metric(&metrics, "walvisor_log_flushes_total")
}

/// The value of a metric of the log. All disks of the log report the same value, so the first one
/// is taken.
fn metric(metrics: &str, name: &str) -> f64 {
    let line = metrics
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value.expect(name).parse().unwrap()
}
