//! What SPECs are taken, and what they mean.

use super::*;

fn parse(text: &str) -> Result<DiskSpec, String> {
    text.parse()
        .map_err(|error: DiskSpecError| error.to_string())
}

#[test]
fn a_path_alone_has_the_defaults() {
    let spec = parse("path=disk.img").unwrap();
    assert_eq!(spec.path, Some(PathBuf::from("disk.img")));
    assert_eq!(spec.log_directory(), Some(PathBuf::from("disk.img.wal")));
    assert_eq!(spec.backend, BackendKind::Wal);
    assert_eq!(spec.transport, TransportKind::Mmio);
    assert_eq!(spec.cache, CacheMode::Writeback);
    assert!(!spec.read_only);
    assert_eq!((spec.queues, spec.queue_size), (None, 256));
}

#[test]
fn every_key_is_carried_out() {
    let spec = parse(
        "path=a.img,log=l,backend=wal,transport=pci,queues=4,queue-size=128,cache=writethrough,readonly=on,serial=S1",
    )
    .unwrap();
    assert_eq!(spec.log_directory(), Some(PathBuf::from("l")));
    assert_eq!(spec.transport, TransportKind::Pci);
    assert_eq!((spec.queues, spec.queue_size), (Some(4), 128));
    assert_eq!(spec.cache, CacheMode::Writethrough);
    assert!(spec.read_only);
    assert_eq!(spec.serial.as_deref(), Some("S1"));
    assert_eq!(spec.commit_wait, CommitWait::default());
    assert_eq!((spec.block_size, spec.in_order), (512, false));
    let blocks = parse("path=a,block-size=4096,in-order=on").unwrap();
    assert_eq!((blocks.block_size, blocks.in_order), (4096, true));
    let exits = parse("path=a,ioeventfd=off").unwrap();
    assert_eq!(exits.notifications, Notifications::Exits);
    for default in ["path=a", "path=a,ioeventfd=on"] {
        let notifications = parse(default).unwrap().notifications;
        assert_eq!(notifications, Notifications::Eventfds, "{default}");
    }
    let pinned = parse("path=a,worker-cpus=2-4+0,poll-usec=50").unwrap();
    assert_eq!(pinned.worker_cpus, [2, 3, 4, 0]);
    assert_eq!(pinned.poll, Duration::from_micros(50));
    let waiting = parse("path=a,commit-wait-usec=500,commit-wait-count=8").unwrap();
    let wait = CommitWait {
        longest: Some(Duration::from_micros(500)),
        count: Some(8),
    };
    assert_eq!(waiting.commit_wait, wait);
    for (text, answer) in [
        ("path=a", None),
        ("path=a,answer=written", Some(Answer::Written)),
        ("path=a,answer=memory", Some(Answer::Memory)),
    ] {
        assert_eq!(parse(text).unwrap().answer, answer, "{text}");
    }
    let ram = parse("backend=ram,size=64M,cache=unsafe").unwrap();
    assert_eq!(
        (ram.backend, ram.size, ram.cache),
        (BackendKind::Ram, Some(64 << 20), CacheMode::Unsafe)
    );
    assert_eq!(ram.log_directory(), None);
}

#[test]
fn help_names_the_keys() {
    let help = help();
    assert!(
        help.contains("ioeventfd=off") && help.contains(KEYS),
        "{help}"
    );
}

#[test]
fn a_wrong_key_is_named_with_the_valid_ones() {
    let error = parse("path=a,cashe=unsafe").unwrap_err();
    assert!(
        error.contains("'cashe'") && error.contains("cache, answer, readonly"),
        "{error}"
    );
    assert!(!error.contains('\n'));
}

#[test]
fn a_raw_disk_has_an_image_and_no_log() {
    let raw = parse("path=a.img,backend=raw,cache=writethrough,readonly=on").unwrap();
    assert_eq!(raw.backend, BackendKind::Raw);
    assert_eq!(raw.log_directory(), None);
    for (wrong, part) in [
        ("backend=raw", "path=FILE"),
        ("backend=raw,path=a,log=l", "leave log= out"),
        ("backend=raw,path=a,size=1M", "size="),
        ("backend=raw,path=a,commit-wait-usec=0", "commit-wait-usec="),
        ("path=a,backend=qcow2", "wal, raw or ram"),
    ] {
        let error = parse(wrong).unwrap_err();
        assert!(error.contains(part), "{wrong}: {error}");
    }
}

#[test]
fn what_is_for_servers_is_refused_elsewhere() {
    for (text, key) in [
        ("path=a,socket=s", "socket="),
        ("path=a,port=10809", "port="),
        ("path=a,port=0,address=::1", "port="),
        ("path=a,answer=memory", "answer="),
        ("path=a,name=a", "name="),
        ("path=a,fabric=loop", "fabric="),
        ("path=a,wwn=naa.0123456789abcdef", "wwn="),
        ("path=a,command-timeout=0", "command-timeout="),
    ] {
        let spec: DiskSpec = text.parse().unwrap();
        let error = spec.check_not_served().unwrap_err().to_string();
        assert!(
            error.contains(key) && error.contains("walvisor serve"),
            "{error}"
        );
    }
    assert_eq!(
        "path=a".parse::<DiskSpec>().unwrap().check_not_served(),
        Ok(())
    );
}

#[test]
fn wrong_values_are_refused() {
    for text in [
        "",
        "path",
        "path=",
        "path=a,path=b",
        "path=a,queues=0",
        "path=a,queues=65",
        "path=a,queue-size=100",
        "path=a,queue-size=65536",
        "path=a,block-size=1024",
        "path=a,block-size=0x200",
        "path=a,in-order=yes",
        "path=a,worker-cpus=",
        "path=a,worker-cpus=1-",
        "path=a,worker-cpus=3-1",
        "path=a,worker-cpus=0+",
        "path=a,worker-cpus=70000",
        "path=a,worker-cpus=0-1024",
        "path=a,poll-usec=1001",
        "path=a,readonly=yes",
        "path=a,serial=",
        "path=a,serial=123456789012345678901",
        "path=a,cache=none",
        "path=a,answer=never",
        "path=a,answer=memory,cache=writethrough",
        "path=a,answer=memory,backend=raw",
        "path=a,transport=ccw",
        "log=l",
        "backend=ram",
        "backend=ram,size=513",
        "backend=ram,size=0",
        "backend=ram,size=1M,log=l",
        "backend=ram,path=x,size=1M",
        "path=a,size=1M",
        "path=a,commit-wait-usec=1000001",
        "path=a,commit-wait-usec=1.5",
        "path=a,commit-wait-count=0",
        "path=a,socket=",
        "path=a,socket=s,port=1",
        "path=a,port=65536",
        "path=a,port=1,address=localhost",
        "path=a,address=::1",
        "backend=ram,size=1M,commit-wait-usec=0",
        "path=a,name=",
        "path=a,name=..",
        "path=a,name=a/b",
        "path=a,name=123456789012345678901234567890123",
        "path=a,fabric=iscsi",
        "path=a,wwn=naa.0123456789ABCDEF",
        "path=a,wwn=naa.0123456789abcde",
        "path=a,command-timeout=86401",
        "path=a,",
    ] {
        assert!(parse(text).is_err(), "{text:?} was taken");
    }
}
