//! `walvisor ctl save-config`: what was added and removed is there after the next start.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use rustix::process::Signal;
use serde_json::json;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;

use super::vhost_user::Client;
use super::{
    Daemon, create, ctl, ctl_refused, disk_names, errors, refused, serve_telling, succeed,
    test_dir, told,
};

/// What is said if the file says already what is served.
const NOTHING: &str = "pool.toml: nothing to save\n";

fn start(dir: &Path, disks: usize) -> Daemon {
    let arguments = "--config pool.toml --control ctl --disk-dir .";
    serve_telling(dir, arguments, disks)
}

/// The first block of a disk that is not in use.
fn exported(dir: &Path, disk: &str) -> Vec<u8> {
    succeed(dir, &format!("disk export {disk} exported"));
    fs::read(dir.join("exported")).unwrap()[..4096].to_vec()
}

/// Disks come and go, and the file of the daemon says so once it is saved; all else in it stays.
/// After a kill the next start takes over the sockets, also that of a disk that was added.
#[test]
fn disks_that_were_added_live_are_there_after_a_kill() {
    let dir = &test_dir();
    for disk in ["a", "b", "c", "d"] {
        create(dir, disk, "1M --log log");
    }
    let rest = "# Of Ann.\n[defaults]\nlog = 'log'  # one for all\n\n[[disk]]\npath = 'a'\ndoor = 'nbd'\nsocket = 'n'\n\n";
    let b = "[[disk]]\npath = 'b'\ndoor = 'vhost-user'\nsocket = 'v'\n";
    fs::write(dir.join("pool.toml"), format!("{rest}{b}")).unwrap();
    fs::set_permissions(dir.join("pool.toml"), fs::Permissions::from_mode(0o640)).unwrap();
    let daemon = start(dir, 2);
    assert_eq!(told(dir, "save-config pool.toml"), NOTHING);
    ctl(dir, "add-disk path=c,door=vhost-user,log=log,socket=late");
    ctl(dir, "add-disk path=d,door=nbd,log=log,socket=n");
    ctl(dir, "remove-disk b");
    ctl(dir, "remove-disk d");
    let before = fs::read_to_string(dir.join("pool.toml")).unwrap();
    assert_eq!(
        ctl(dir, "save-config pool.toml"),
        json!({ "config": "pool.toml", "added": ["c"], "removed": ["b"], "detached": [] })
    );
    let after = fs::read_to_string(dir.join("pool.toml")).unwrap();
    let c = "\n[[disk]]\npath = \"c\"\ndoor = \"vhost-user\"\nsocket = \"late\"\n";
    assert_eq!(before, format!("{rest}{b}"));
    assert_eq!(after, format!("{rest}{c}"));
    let mode = fs::metadata(dir.join("pool.toml"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o640);
    assert_eq!(told(dir, "save-config pool.toml"), NOTHING);
    // The daemon serves what the file says.
    daemon.signal(Signal::HUP);
    ctl(dir, "mark read-again");
    assert_eq!(disk_names(dir), ["a", "c"]);
    assert!(dir.join("late").metadata().unwrap().file_type().is_socket());
    // One more, of which the file knows nothing.
    let unsaved = "add-disk path=d,door=vhost-user,log=log,socket=later";
    ctl(dir, unsaved);
    daemon.kill();
    assert_eq!(errors(dir), "");
    for socket in ["late", "later"] {
        assert!(dir.join(socket).exists(), "nobody removes it");
    }
    let daemon = start(dir, 2);
    assert_eq!(disk_names(dir), ["a", "c"]);
    ctl(dir, unsaved);
    ctl(dir, "remove-disk d");
    assert_eq!(Client::connect(&dir.join("late"), 1).capacity(), 2048);
    // What the file has comes again.
    ctl(dir, "remove-disk a");
    daemon.signal(Signal::HUP);
    wait_until("the disk comes again", || disk_names(dir) == ["c", "a"]);
    assert_eq!(daemon.stop(), "");
    let leftover: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(
        leftover
            .iter()
            .all(|name| !name.to_string_lossy().starts_with(".walvisor")),
        "{leftover:?}"
    );
}

#[test]
fn what_cannot_be_saved_is_one_line_and_changes_nothing() {
    let dir = &test_dir();
    for disk in ["a", "b"] {
        create(dir, disk, "1M");
    }
    let refused = |part: &str| ctl_refused(dir, "save-config pool.toml", &[part]);
    let daemon = Daemon::start(dir, "--control ctl --disk path=a,socket=n");
    fs::write(dir.join("pool.toml"), "").unwrap();
    refused("this daemon has no configuration file: start it with --config FILE");
    assert_eq!(daemon.stop(), "");
    // In the file's new defaults, the disk would be another one.
    let pool = "[defaults]\nretain = '1h'\n[[disk]]\npath = 'a'\ndoor = 'nbd'\nsocket = 'n'\n";
    fs::write(dir.join("pool.toml"), pool).unwrap();
    let daemon = start(dir, 1);
    ctl(dir, "add-disk path=b,door=nbd,socket=n");
    fs::write(
        dir.join("pool.toml"),
        pool.replace("[[", "cache = 'unsafe'\n[["),
    )
    .unwrap();
    refused("[defaults] would set cache=unsafe: add the disk again with that key");
    fs::write(dir.join("pool.toml"), "disk = 1\n").unwrap();
    refused("pool.toml: no disk: give a table");
    fs::remove_file(dir.join("pool.toml")).unwrap();
    refused("pool.toml: No such file");
    assert_eq!(disk_names(dir), ["a", "b"]);
    daemon.stop();
}

#[test]
fn what_is_saved_is_what_is_served() {
    let dir = &test_dir();
    for disk in ["a", "b", "c"] {
        create(dir, disk, "1M --log log");
    }
    let file = |disks: &[&str]| {
        let tables = disks
            .iter()
            .map(|disk| format!("\n[[disk]]\npath = \"{disk}\"\n"));
        let tables: String = tables.collect();
        format!("[defaults]\ndoor = 'nbd'\nlog = 'log'\nsocket = 'n'\n{tables}")
    };
    let write = |disks: &[&str]| fs::write(dir.join("pool.toml"), file(disks)).unwrap();
    let read = || fs::read_to_string(dir.join("pool.toml")).unwrap();
    write(&["a", "b"]);
    let daemon = start(dir, 2);
    let reload = |disks: &[&str]| {
        daemon.signal(Signal::HUP);
        wait_until("the disks", || disk_names(dir) == disks);
    };
    // A client has removed it, and the file has brought it back.
    ctl(dir, "remove-disk b");
    reload(&["a", "b"]);
    assert_eq!(told(dir, "save-config pool.toml"), NOTHING);
    assert_eq!(read(), file(&["a", "b"]));
    // A client has added it, and the file has let it go.
    ctl(dir, "add-disk path=c,log=log,socket=n,door=nbd");
    assert_eq!(told(dir, "save-config pool.toml"), "pool.toml: added c\n");
    write(&["a", "c"]);
    reload(&["a", "c"]);
    write(&["a"]);
    reload(&["a"]);
    assert_eq!(told(dir, "save-config pool.toml"), NOTHING);
    assert_eq!(read(), file(&["a"]));
    // The same at once: the daemon knows what was saved.
    ctl(dir, "add-disk path=c,log=log,socket=n,door=nbd");
    ctl(dir, "save-config pool.toml");
    write(&["a"]);
    reload(&["a"]);
    // The file has lost one that is served: it comes back. One that came is not served yet.
    write(&["b"]);
    assert_eq!(
        told(dir, "save-config pool.toml"),
        "pool.toml: added a; removed b\n"
    );
    daemon.stop();
}

/// A log with history keeps the records of a disk that is removed. The file names the image for the
/// next start, which can't open the log without it.
#[test]
fn a_pool_starts_without_a_disk_that_its_log_remembers() {
    let dir = &test_dir();
    for disk in ["a", "b", "c", "d"] {
        create(dir, disk, "1M --log log");
    }
    let real = |name: &str| dir.canonicalize().unwrap().join(name).display().to_string();
    let defaults = "[defaults]\ndoor = 'nbd'\nlog = 'log'\nsocket = 'n'\nretain = '1h'\n";
    let table = |disk: &str| format!("[[disk]]\npath = '{disk}'\n");
    let [a, b, c, d] = ["a", "b", "c", "d"].map(table);
    fs::write(dir.join("pool.toml"), format!("{defaults}{b}{a}{c}{d}")).unwrap();
    let read = || fs::read_to_string(dir.join("pool.toml")).unwrap();
    let daemon = start(dir, 4);
    RawClient::extended_to(&dir.join("n"), "b").write(1, 0, &[7; 4096]);
    ctl(dir, "remove-disk b");
    ctl(dir, "remove-disk c");
    // The image of c is gone: nobody could open it. Its disk has written nothing.
    fs::remove_file(dir.join("c")).unwrap();
    // Whoever saves need not be where the daemon is.
    let save = format!("ctl {} save-config {}", real("ctl"), real("pool.toml"));
    let elsewhere = test_dir();
    let saved = format!(
        "{}: removed b, c; detached {}\n",
        real("pool.toml"),
        real("b")
    );
    assert_eq!(succeed(&elsewhere, &save), saved);
    assert_eq!(told(dir, "save-config pool.toml"), NOTHING);
    let detached = format!("detached = \"{}\"\n", real("b"));
    assert_eq!(read(), format!("{defaults}{a}{detached}{d}"));
    daemon.signal(Signal::HUP);
    wait_until("the disks", || disk_names(dir) == ["a", "d"]);
    assert_eq!(daemon.stop(), "");
    assert_eq!(errors(dir), "", "the same disks as before");
    // The table that names it goes.
    let daemon = start(dir, 2);
    ctl(dir, "remove-disk a");
    let saved = format!(
        "pool.toml: removed a; detached {}, {}\n",
        real("b"),
        real("a")
    );
    assert_eq!(told(dir, "save-config pool.toml"), saved);
    let both = format!("detached = \"{}:{}\"\n", real("b"), real("a"));
    assert_eq!(read(), format!("{defaults}{d}{both}"));
    assert_eq!(daemon.stop(), "");
    let daemon = start(dir, 1);
    ctl(dir, "add-disk path=b");
    ctl(dir, "save-config pool.toml");
    assert_eq!(daemon.stop(), "");
    let daemon = start(dir, 2);
    assert_eq!(disk_names(dir), ["d", "b"]);
    // A name that can't be written down.
    ctl(dir, "add-disk path=e:f,size=1M");
    RawClient::extended_to(&dir.join("n"), "e:f").write(1, 0, &[7; 4096]);
    ctl(dir, "remove-disk e:f");
    ctl_refused(
        dir,
        "save-config pool.toml",
        &["because of its ':': add the disk again"],
    );
    assert_eq!(daemon.stop(), "");
    assert_eq!(errors(dir), "");
    assert_eq!(exported(dir, "b"), [7; 4096]);
}

/// A log with history has the image of a disk that was removed open. Another file at its path is not
/// taken for it.
#[test]
fn an_image_that_was_replaced_while_its_disk_was_removed_is_not_that_disk() {
    let dir = &test_dir();
    create(dir, "a", "1M --log log");
    let serve = "--control ctl --disk-dir . --disk path=a,log=log,socket=n,retain=1h";
    let daemon = Daemon::start(dir, serve);
    let add = "add-disk path=b,log=log,socket=n";
    ctl(dir, &format!("{add},size=1M"));
    RawClient::extended_to(&dir.join("n"), "b").write(1, 0, &[7; 4096]);
    ctl(dir, "remove-disk b");
    fs::rename(dir.join("b"), dir.join("moved")).unwrap();
    let other = [
        "b: another file than the image of the disk that was here",
        "walvisor disk discard b --log log",
    ];
    ctl_refused(dir, &format!("{add},size=2M"), &other);
    assert!(!dir.join("b").exists(), "what was made for it is gone");
    ctl_refused(dir, add, &["b: can't open the disk: No such file"]);
    fs::write(dir.join("b"), vec![0; 1 << 20]).unwrap();
    ctl_refused(dir, add, &other);
    assert_eq!(fs::read(dir.join("b")).unwrap(), vec![0; 1 << 20]);
    fs::rename(dir.join("moved"), dir.join("b")).unwrap();
    ctl(dir, add);
    daemon.stop();
    assert_eq!(exported(dir, "b"), [7; 4096]);
}

/// A disk that is added takes what the file says for all, and its image is made if it says a size.
#[test]
fn a_disk_that_is_added_takes_the_defaults_of_the_file() {
    let dir = &test_dir();
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log");
    }
    let defaults =
        "[defaults]\ndoor = 'nbd'\nlog = 'log'\nsocket = 'n'\nretain = '1h'\nclose-seconds = 1\n";
    let a = "[[disk]]\npath = 'a'\n";
    fs::write(dir.join("pool.toml"), format!("{defaults}{a}")).unwrap();
    let daemon = start(dir, 1);
    // What the file has said since of logs is for the next start.
    let changed = defaults.replace("1h", "2h") + "archive = 'file:///none'\n" + a;
    fs::write(dir.join("pool.toml"), changed).unwrap();
    daemon.signal(Signal::HUP);
    wait_until("a warning", || {
        errors(dir).contains("the keys of disk 'a' have changed")
    });
    ctl(dir, "add-disk path=e,size=1M");
    ctl(dir, "remove-disk e");
    ctl(dir, "add-disk path=f,log=f.wal,size=1M");
    assert_eq!(ctl(dir, "snapshots --disk f")["retain"], "2h");
    ctl(dir, "remove-disk f");
    ctl(dir, "set-retain 3h --disk a");
    ctl(dir, "add-disk path=e,retain=3h");
    ctl(dir, "remove-disk e");
    ctl(dir, "set-retain 1h --disk a --give-up-history");
    for image in ["e", "f"] {
        fs::remove_file(dir.join(image)).unwrap();
    }
    fs::write(dir.join("pool.toml"), format!("{defaults}{a}")).unwrap();
    daemon.signal(Signal::HUP);
    // The keys of a log are those with which it is open, in any words.
    ctl(dir, "add-disk path=b,retain=60m,index-memory=64M");
    let added = ctl(dir, "add-disk path=c,size=2M,serial=new");
    assert_eq!(
        (&added["log"], &added["size_bytes"], &added["disk"]),
        (&json!("log"), &json!(2 << 20), &json!("new"))
    );
    let mode = fs::metadata(dir.join("c")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    RawClient::extended_to(&dir.join("n"), "new").write(1, 0, &[7; 4096]);
    for (spec, part) in [
        (
            "path=d,size=1M,close-seconds=2",
            "which is open with 1: leave close-seconds= out",
        ),
        (
            "path=d,size=1M,on-full=pause",
            "on-full=pause differs from on-full= of its log",
        ),
        (
            "path=d,size=1M,spill-limit=1M",
            "of its log, which is open with none: leave spill-limit= out",
        ),
        (
            "path=d,size=1000",
            "size=1000: give a positive multiple of 512",
        ),
        ("path=a.toml,size=1M,door=tcmu", "door=tcmu"),
        (
            "backend=raw,path=pool.toml,size=1M",
            "there is one already: leave size= out",
        ),
    ] {
        ctl_refused(dir, &format!("add-disk {spec}"), &[part]);
    }
    assert!(!dir.join("d").exists() && !dir.join("a.toml").exists());
    ctl(dir, "add-disk backend=raw,path=raw,size=1M");
    ctl(dir, "save-config pool.toml");
    let saved = fs::read_to_string(dir.join("pool.toml")).unwrap();
    let b = "\n[[disk]]\npath = \"b\"\nretain = \"60m\"\nindex-memory = \"64M\"\n";
    let c = "\n[[disk]]\npath = \"c\"\nserial = \"new\"\n";
    let raw = "\n[[disk]]\nbackend = \"raw\"\npath = \"raw\"\n";
    assert_eq!(saved, format!("{defaults}{a}{b}{c}{raw}"));
    assert_eq!(daemon.stop(), "");
    let daemon = start(dir, 4);
    assert_eq!(disk_names(dir), ["a", "b", "new", "raw"]);
    // The file's new disks repeat the keys of the log too.
    fs::write(
        dir.join("pool.toml"),
        saved.replace("'log'\n", "'log'\non-full = 'fail'\n") + "[[disk]]\npath = 'd'\n",
    )
    .unwrap();
    fs::write(dir.join("d"), vec![0; 1 << 20]).unwrap();
    daemon.signal(Signal::HUP);
    wait_until("the disk comes", || disk_names(dir).len() == 5);
    daemon.stop();
    assert_eq!(exported(dir, "c"), [7; 4096]);
}

/// The one who asks says which file, and a daemon that somebody has taken over can't choose another.
#[test]
fn a_daemon_does_not_choose_the_file_that_is_written() {
    let dir = &test_dir();
    create(dir, "a", "1M");
    let text = "[[disk]]\npath = 'a'\ndoor = 'nbd'\nsocket = 'n'\n";
    for file in ["pool.toml", "other.toml"] {
        fs::write(dir.join(file), text).unwrap();
    }
    refused(dir, "ctl ctl save-config", 2, &["<FILE>"]);
    let listener = UnixListener::bind(dir.join("ctl")).unwrap();
    let victim = dir.join("other.toml").display().to_string();
    let spec = "path=b,door=nbd,socket=n";
    let disks = json!([{ "disk": "b", "spec": spec }]);
    // As walvisor answered before, too.
    let answer = json!({ "return": {
        "config": victim, "kind": "serve", "disks": disks, "added": disks, "removed": [],
    } });
    let answering = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut request = String::new();
        BufReader::new(&client).read_line(&mut request).unwrap();
        writeln!(client, "{answer}").unwrap();
    });
    let parts = ["pool.toml: ", "other.toml", "save to that file"];
    ctl_refused(dir, "save-config pool.toml", &parts);
    answering.join().unwrap();
    for file in ["pool.toml", "other.toml"] {
        assert_eq!(fs::read_to_string(dir.join(file)).unwrap(), text);
    }
}
