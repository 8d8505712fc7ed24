//! The points of a disk in use, and requests about one of several disks: their names, and pauses.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use walvisor_testkit::nbd::{FLUSH, RawClient};
use walvisor_tests::run_sessions;

use super::{
    Daemon, assert_says, create, ctl, ctl_refused, read, refused, succeed, test_dir, told,
};

/// A daemon with the disks `vms/a` and `b` of 1 MiB on a log that keeps all history, and a client
/// of each.
fn two_disks(dir: &Path) -> (Daemon, [RawClient; 2]) {
    fs::create_dir(dir.join("vms")).unwrap();
    for disk in ["vms/a", "b"] {
        create(dir, disk, "1M --log log --retain all");
    }
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=vms/a,log=log,socket=s --disk path=b,log=log,socket=t",
    );
    let clients = ["s", "t"].map(|socket| RawClient::extended(&dir.join(socket)));
    (daemon, clients)
}

fn commit(client: &mut RawClient, byte: u8) {
    client.write(1, 0, &[byte; 4096]);
    client.flush(2);
}

/// Each point of a disk is listed with what is typed for it, and is there.
#[test]
fn each_listed_point_of_a_disk_in_use_comes_back() {
    let dir = &test_dir();
    let (daemon, mut clients) = two_disks(dir);
    let listed = |words: &str| succeed(dir, &format!("disk points {words} --log log"));
    let points_of = |words: &str| -> Value {
        serde_json::from_str(&listed(&format!("{words} --json"))).unwrap()
    };
    let none = points_of("b");
    assert_eq!((&none["commits"], &none["points"]), (&json!(0), &json!([])));
    // The contents of disk `vms/a` at each point, oldest first.
    let mut expected = vec![];
    for byte in 1..=3 {
        commit(&mut clients[0], byte);
        expected.push(("commit", byte));
        // No point of the disk.
        commit(&mut clients[1], 100);
        if byte == 1 {
            ctl(dir, "mark one --disk b");
            expected.push(("mark", 1));
        }
        if byte == 2 {
            // One log, so the snapshot needs no name of a disk.
            ctl(dir, "snapshot two");
            expected.push(("snapshot", 2));
        }
    }
    // A point of the other disk alone.
    ctl(dir, "snapshot other --alone --disk b");
    let answer = points_of("vms/a");
    assert_eq!(
        (&answer["disk"], &answer["log"], &answer["retain"]),
        (&json!("vms/a"), &json!("log"), &json!("all"))
    );
    assert_eq!(
        (&answer["commits"], &answer["oldest"]["lsn"]),
        (&json!(4), &json!(0))
    );
    let kinds = |answer: &Value| {
        let points = answer["points"].as_array().unwrap().iter();
        let kinds = points.map(|point| point["kind"].as_str().unwrap().to_owned());
        kinds.collect::<Vec<_>>()
    };
    let (expected_kinds, bytes): (Vec<_>, Vec<_>) = expected.into_iter().unzip();
    assert_eq!(kinds(&answer), expected_kinds);
    let points = answer["points"].as_array().unwrap();
    let at = |point: &Value| point["at"].as_str().unwrap().to_owned();
    let places = points.iter().map(at).zip(bytes);
    for (at, byte) in places.chain([("lsn:0".to_owned(), 0)]) {
        ctl(dir, &format!("export --disk a --at {at} -o out --force"));
        assert_eq!(fs::read(dir.join("out")).unwrap()[0], byte, "{at}");
    }
    // The same for people, in lines that fit a terminal.
    let table = listed("vms/a");
    let lines = [
        "vms/a on the log log, retain=all\n",
        "the oldest point without a snapshot",
        "snapshot, 0 B saved",
        "mark \"one\"",
        "commit, 4 KiB written by 1 record\n",
    ];
    assert_says(&table, &lines);
    for point in points {
        let first = format!("\n{} ", at(point));
        assert_eq!(table.matches(&first).count(), 1, "{first}: {table}");
    }
    let fits = |line: &str| line.chars().count() <= 120;
    assert!(table.lines().all(fits), "{table}");
    // The newest commits only; a mark stays.
    let few = points_of("vms/a --newest 1");
    assert_eq!(kinds(&few), ["mark", "snapshot", "commit"]);
    assert_eq!(few["commits"], 4);
    let table = listed("vms/a --newest 1");
    let rest = "\n2 older commits are not shown: --newest N shows more\n";
    assert!(table.ends_with(rest), "{table}");
    let now = ["'walvisor ctl points' is 'walvisor disk points PATH' now"];
    refused(dir, "ctl ctl points", 2, &now);
    // What the table of snapshots tells.
    let table = told(dir, "snapshots");
    let lines: Vec<_> = table.lines().collect();
    assert!(
        lines.len() == 4
            && lines[0] == "retain=all"
            && lines[2].starts_with("two")
            && lines[3].starts_with("other"),
        "{table}"
    );
    // The error for a time that the history does not reach says when it begins, and that is a
    // point.
    let error = ctl_refused(
        dir,
        "export --disk a --at -1d -o new",
        &["the log has retain=all"],
    );
    let (_, rest) = error.split_once("and lsn:1 of cid:1, at ").expect(&error);
    let at = rest.split_once(';').unwrap().0;
    assert!(at.starts_with("time:2") && at.ends_with('Z'), "{at}");
    ctl(dir, &format!("export --disk a --at {at} -o new"));
    assert_eq!(fs::read(dir.join("new")).unwrap()[0], 1);
    drop(clients);
    assert_eq!(daemon.stop(), "");
}

/// One disk is paused and restored while a client of another one on the same log goes on.
#[test]
fn one_disk_is_paused_and_restored_while_another_goes_on() {
    let dir = &test_dir();
    let (daemon, mut clients) = two_disks(dir);
    for byte in [1, 2] {
        clients.iter_mut().for_each(|client| commit(client, byte));
    }
    // Its export has this name, and so has it.
    let paused = ctl(dir, "pause --disk a");
    assert_eq!(paused, json!({ "disk": "vms/a", "state": "paused" }));
    let stats = ctl(dir, "stats");
    assert_eq!(stats["state"], "running");
    assert_eq!(
        [0, 1].map(|disk| stats["disks"][disk]["paused"].clone()),
        [json!(true), json!(false)]
    );
    let table = told(dir, "stats");
    assert!(table.contains("nbd, writeback, ok, paused\n"), "{table}");
    clients[0].request(0, FLUSH, 5, 0, 0);
    commit(&mut clients[1], 3);
    ctl_refused(dir, "restore --disk b --at cid:1", &["pause --disk b'"]);
    assert_eq!(ctl(dir, "restore --disk vms/a --at cid:1")["disk"], "vms/a");
    // A pause of all, and its end, is one of this disk too.
    ctl(dir, "pause");
    ctl_refused(dir, "resume --disk b", &["all disks are paused"]);
    ctl(dir, "resume");
    assert_eq!(clients[0].reply().cookie, 5);
    let first = clients.each_mut().map(|client| read(client, 0, 4096)[0]);
    assert_eq!(first, [1, 3]);
    ctl(dir, "pause --disk b");
    clients[1].request(0, FLUSH, 6, 0, 0);
    commit(&mut clients[0], 4);
    assert_eq!(ctl(dir, "resume --disk b")["state"], "running");
    assert_eq!(clients[1].reply().cookie, 6);
    // No pause holds up the end, and no request that waits for one.
    ctl(dir, "pause --disk a");
    clients[0].request(0, FLUSH, 7, 0, 0);
    assert_eq!(daemon.stop(), "");
}

/// The name of a disk's export is a name of the disk, and a request about a log needs none if there
/// is one log.
#[test]
fn names_of_exports_and_of_the_only_log() {
    let dir = &test_dir();
    let (daemon, clients) = two_disks(dir);
    run_sessions("names", dir, []);
    drop(clients);
    daemon.stop();
    // Two logs, and a disk that has the name of another one's export.
    create(dir, "a", "1M");
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=vms/a,log=log,socket=s --disk path=a,socket=t",
    );
    ctl_refused(dir, "snapshot now", &["say which disk: vms/a, a"]);
    assert_eq!(ctl(dir, "resize --disk a --size 3M")["disk"], "a");
    daemon.stop();
}
