//! `walvisor ctl save-config`: what was added and removed is there after the next start.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use rustix::process::Signal;
use serde_json::json;
use walvisor_testkit::wait_until;

use super::vhost_user::Client;
use super::{
    Daemon, create, ctl, ctl_refused, disk_names, errors, refused, serve_telling, test_dir, told,
};

/// What is said if the file says already what is served.
const NOTHING: &str = "pool.toml: nothing to save\n";

fn start(dir: &Path, disks: usize) -> Daemon {
    let arguments = "--config pool.toml --control ctl --disk-dir .";
    serve_telling(dir, arguments, disks)
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
        json!({ "config": "pool.toml", "added": ["c"], "removed": ["b"] })
    );
    let after = fs::read_to_string(dir.join("pool.toml")).unwrap();
    let c = "\n[[disk]]\npath = \"c\"\ndoor = \"vhost-user\"\nlog = \"log\"\nsocket = \"late\"\n";
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
    // In the file's defaults, the disk would have another log.
    let pool = "[defaults]\nretain = '1h'\n[[disk]]\npath = 'a'\ndoor = 'nbd'\nsocket = 'n'\n";
    fs::write(dir.join("pool.toml"), pool).unwrap();
    let daemon = start(dir, 1);
    ctl(dir, "add-disk path=b,door=nbd,socket=n");
    refused("disk 'b': [defaults] would set retain=1h");
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
