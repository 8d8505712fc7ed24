//! How much stack requests take.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};

use serde_json::Value;
use walvisor_storage::{BlockingDisk, DiskOptions, Retention, Store, StoreOptions, create_disk};

use super::*;
use crate::control_socket::MAX_DEPTH;
use crate::control_socket::fixture::{daemon, disk};

/// Sends a line, and returns its answer.
fn ask(mut stream: &UnixStream, line: &str, files: &[BorrowedFd<'_>]) -> Value {
    let sent = descriptors::send(stream, line.as_bytes(), files).unwrap();
    stream.write_all(&line.as_bytes()[sent..]).unwrap();
    stream.write_all(b"\n").unwrap();
    let mut answers = BufReader::new(stream);
    loop {
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        assert!(answer.ends_with('\n'), "{line}: no answer");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        if answer.get("event").is_none() {
            return answer;
        }
    }
}

/// Walks what requests can do with a disk that has a log, and the deepest lines, on an eighth of
/// the stack. Parsing a line that is nested 126 deep, the most that the parser takes, would take
/// almost twice as much.
#[test]
fn the_deepest_requests_take_an_eighth_of_the_stack() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = (dir.path().join("disk"), dir.path().join("log"));
    let options = StoreOptions {
        retain: Some(Retention::All),
        ..StoreOptions::default()
    };
    create_disk(&path, 1 << 20, &log, &options).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
    let controlled = daemon(vec![disk("disk", store.disks()[0].clone())]);
    let (client, served) = UnixStream::pair().unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    served.set_nonblocking(true).unwrap();
    let stop = Stop::new().unwrap();
    let serve = move || converse(&served, &controlled, &stop);
    let thread = thread("control-client").stack_size(STACK / 8);
    let serving = thread.spawn(serve).unwrap();

    let does = |name: &str, arguments: &str, files: &[BorrowedFd<'_>]| {
        let line = format!("{{\"execute\":\"{name}\",\"arguments\":{{{arguments}}}}}");
        let answer = ask(&client, &line, files);
        assert!(answer.get("return").is_some(), "{line}: {answer}");
    };
    let write = |byte| {
        let disk = BlockingDisk::new(store.disks()[0].clone());
        disk.write(&[byte; 4096], 0).unwrap();
        disk.flush().unwrap();
    };
    write(1);
    does("mark", "\"text\":\"a mark\"", &[]);
    does("snapshot", "\"name\":\"one\"", &[]);
    write(2);
    for name in ["stats", "snapshots", "looks", "exports"] {
        does(name, "", &[]);
    }
    does("stats", "\"format\":\"prometheus\"", &[]);
    does("resize", "\"size_bytes\":2097152", &[]);
    does("cache", "\"cache\":\"writethrough\"", &[]);
    does("limits", "\"ops_per_second\":1000,\"weight\":7", &[]);
    for (copy, at) in [("copy", ""), ("past", "\"at\":\"snapshot:one\"")] {
        let copy = File::create(dir.path().join(copy)).unwrap();
        does("export", at, &[copy.as_fd()]);
    }
    does("pause", "\"disk\":\"disk\"", &[]);
    does("restore", "\"at\":\"snapshot:one\"", &[]);
    does("resume", "", &[]);
    does(
        "set-retain",
        "\"retain\":\"24h\",\"give_up_history\":true",
        &[],
    );
    does("checkpoint", "\"give_up_history\":true", &[]);

    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let nested = |deep: usize| format!("{}1{}", open.repeat(deep), close.repeat(deep));
        let id = nested(MAX_DEPTH - 1);
        // What is parsed and then refused, for its arguments or for want of a descriptor.
        for name in ControlCommand::names() {
            let arguments = format!("{{\"disk\":{}}}", nested(MAX_DEPTH - 2));
            let line = format!("{{\"execute\":\"{name}\",\"arguments\":{arguments},\"id\":{id}}}");
            let answer = ask(&client, &line, &[]);
            assert_eq!(answer["error"]["class"], "GenericError", "{answer}");
            assert_eq!(answer["id"].to_string(), id, "{answer}");
        }
        for deep in [MAX_DEPTH, 126, 127, 10_000] {
            let line = format!("{{\"execute\":\"stats\",\"id\":{}}}", nested(deep));
            let answer = ask(&client, &line, &[]);
            let text = answer["error"]["desc"].as_str().unwrap();
            assert!(text.contains("more than 16 deep"), "{answer}");
        }
    }
    does("shutdown", "", &[]);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&client).read(&mut [0]).unwrap(), 0);
    serving.join().unwrap().unwrap();
    store.close().unwrap();
    assert_eq!(
        fs::metadata(dir.path().join("copy")).unwrap().len(),
        2 << 20
    );
}
