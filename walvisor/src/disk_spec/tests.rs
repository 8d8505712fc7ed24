//! Which SPECs are accepted, and what they mean.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use walvisor_devices::backend::Answer;
use walvisor_storage::Point;

use super::key::Key;
use super::table::{LOG_KEYS, keys};
use super::*;

/// A command that takes every existing key of `text`, or else the last command.
fn command(text: &str) -> DiskCommand {
    let keys = text.split(',').filter_map(|part| part.split_once('='));
    let keys: Vec<_> = keys
        .filter_map(|(name, _)| super::table::key(name))
        .collect();
    let takes = |command: &DiskCommand| keys.iter().all(|key| key.commands.contains(command));
    let found = DiskCommand::ALL.into_iter().find(takes);
    found.unwrap_or(DiskCommand::Tcmu)
}

fn parse(text: &str) -> Result<DiskSpec, String> {
    DiskSpec::parse(text, command(text)).map_err(|error| error.to_string())
}

#[test]
fn a_path_alone_has_the_defaults() {
    let spec = parse("path=disk.img").unwrap();
    assert_eq!(spec.path, Some(PathBuf::from("disk.img")));
    assert_eq!(spec.log_directory(), Some(PathBuf::from("disk.img.wal")));
    assert_eq!(spec.backend, BackendKind::Wal);
    assert_eq!(spec.transport, TransportKind::Mmio);
    assert_eq!(spec.cache, DiskCache::Writeback);
    assert!(!spec.read_only);
    assert_eq!((spec.queues, spec.queue_size), (None, 256));
}

#[test]
fn every_key_sets_its_field() {
    let spec = parse(
        "path=a.img,log=l,backend=wal,transport=pci,queues=4,queue-size=128,cache=writethrough,readonly=on,serial=S1",
    )
    .unwrap();
    assert_eq!(spec.log_directory(), Some(PathBuf::from("l")));
    assert_eq!(spec.transport, TransportKind::Pci);
    assert_eq!((spec.queues, spec.queue_size), (Some(4), 128));
    assert_eq!(spec.cache, DiskCache::Writethrough);
    assert!(spec.read_only);
    assert_eq!(spec.serial.as_deref(), Some("S1"));
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let plain = parse("path=a").unwrap();
    assert_eq!(plain.log_options, LogOptions::default());
    assert_eq!((plain.block_size, plain.in_order), (512, false));
    assert_eq!(plain.notifications, Notifications::Eventfds);
    assert_eq!(plain.answer, Answer::Written);
    let spec =
        parse("path=a,block-size=4096,in-order=on,ioeventfd=off,worker-cpus=2-4+0,poll-usec=50");
    let spec = spec.unwrap();
    assert_eq!((spec.block_size, spec.in_order), (4096, true));
    assert_eq!(spec.notifications, Notifications::Exits);
    assert_eq!(spec.worker_cpus, [2, 3, 4, 0]);
    assert_eq!(spec.poll, Duration::from_micros(50));
    let spec =
        parse("path=a,commit-wait-usec=500,commit-wait-count=8,close-seconds=86400").unwrap();
    let options = LogOptions {
        commit_wait: Some(Duration::from_micros(500)),
        commit_count: Some(8),
        close_time: seconds(86_400),
        ..LogOptions::default()
    };
    assert_eq!(spec.log_options, options);
    let spec = parse("path=a,close-seconds=0,answer=memory").unwrap();
    assert_eq!(
        (spec.log_options.close_time, spec.answer),
        (seconds(0), Answer::Memory)
    );
    let ram = parse("backend=ram,size=64M,cache=unsafe").unwrap();
    assert_eq!((ram.backend, ram.size), (BackendKind::Ram, Some(64 << 20)));
    assert_eq!((ram.cache, ram.log_directory()), (DiskCache::Unsafe, None));
}

/// A SPEC with `key=value` and every other key that it requires.
fn with(key: &Key, value: &str, backend: BackendKind) -> String {
    let mut text = match backend {
        BackendKind::Ram => "size=1M".to_owned(),
        _ => "path=a".to_owned(),
    };
    if backend != BackendKind::Wal {
        let _ = write!(text, ",backend={}", backend.name());
    }
    text.push_str(match key.name {
        "ops-burst" => ",ops-per-second=9",
        "bytes-burst" => ",bytes-per-second=9",
        "address" => ",port=1",
        _ => "",
    });
    let name = key.name;
    if text
        .split(',')
        .any(|part| part.starts_with(&format!("{name}=")))
    {
        text
    } else {
        format!("{text},{name}={value}")
    }
}

/// A value that `key` accepts.
fn example(key: &Key) -> &'static str {
    match key.name {
        "door" => "nbd",
        "path" | "log" | "socket" | "name" | "serial" => "a",
        "wwn" => "naa.0123456789abcdef",
        "worker-cpus" => "0",
        "ops-per-second" | "ops-burst" | "bytes-per-second" | "bytes-burst" => "1",
        "commit-wait-usec" | "commit-wait-count" | "close-seconds" => "1",
        "command-timeout" | "queues" | "port" => "1",
        "size" | "index-memory" | "spill-limit" => "1M",
        "format" => "raw",
        "at" => "cid:1",
        "retain" => "24h",
        "on-full" => "pause",
        "archive" => "file:///a",
        "archive-interval" => "1s",
        "archive-sync" => "on",
        "archive-limit" => "1M",
        _ => key.default,
    }
}

#[test]
fn a_key_is_accepted_by_its_commands_and_backends_only() {
    let mut tried = [0, 0];
    for key in keys() {
        for command in DiskCommand::ALL {
            for backend in BackendKind::ALL {
                // The examples are the defaults where a default is a value.
                let text = with(key, example(key), backend);
                let text = match key.name {
                    "backend" => "backend=wal,path=a".to_owned(),
                    _ => text,
                };
                let parsed = DiskSpec::parse(&text, command);
                let (ours, fits) = (
                    key.commands.contains(&command),
                    key.backends.contains(&backend),
                );
                match parsed {
                    Ok(_) => assert!(ours && fits, "{command:?} accepted {text}"),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(!ours || !fits, "{text}, {command:?}: {error}");
                        let named = format!("{}= is for ", key.name);
                        let remedy = format!("leave {}= out", key.name);
                        let names_it = error.contains(&named) && error.contains(&remedy);
                        assert!(
                            names_it
                                || key.name == "path"
                                || key.name == "size"
                                || key.name == "address",
                            "{text}: {error}"
                        );
                    }
                }
                tried[usize::from(ours && fits)] += 1;
            }
        }
    }
    assert!(tried[0] > 100 && tried[1] > 100, "{tried:?}");
}

#[test]
fn giving_a_key_its_default_changes_nothing() {
    let mut values = 0;
    for key in keys().filter(|key| !key.default.contains(' ')) {
        values += 1;
        let command = key.commands[0];
        let parse = |text: &str| DiskSpec::parse(text, key.commands[0]).unwrap();
        let port = if key.name == "address" { ",port=1" } else { "" };
        let without = parse(&format!("path=a{port}"));
        let given = parse(&format!("path=a{port},{}={}", key.name, key.default));
        assert_eq!(given, without, "{} of {command:?}", key.name);
    }
    assert!(values > 10, "{values}");
}

#[test]
fn names_are_unique_and_help_is_a_phrase() {
    for (index, key) in keys().enumerate() {
        assert!(keys().take(index).all(|other| other.name != key.name));
        assert!(!key.help.ends_with('.') && !key.commands.is_empty() && !key.backends.is_empty());
        assert!(!format!("{}{}{}", key.help, key.default, key.value.expected()).contains('|'));
    }
}

/// Each row for a log sets an option that is joined with those of the log's other disks.
#[test]
fn disks_of_a_log_say_different_keys_and_no_different_values() {
    let with = |key: &Key, value: &str| parse(&format!("path=a,{}={value}", key.name)).unwrap();
    let other = |key: &Key| match key.name {
        "retain" => "25h",
        "on-full" => "fail",
        "archive" => "file:///b",
        "archive-interval" => "2s",
        "archive-sync" => "off",
        "index-memory" | "spill-limit" | "archive-limit" => "2M",
        _ => "2",
    };
    let mut all = LogOptions::default();
    for key in LOG_KEYS {
        let own = with(key, example(key)).log_options;
        assert_eq!(
            own.said().map(|(name, _)| name).collect::<Vec<_>>(),
            [key.name]
        );
        assert_eq!(all.covers(&own).unwrap_err().values[0], "none");
        all.join(&own).unwrap();
        all.covers(&own).unwrap();
        let before = all.clone();
        let disagreement = all.join(&with(key, other(key)).log_options).unwrap_err();
        assert_eq!((disagreement.key, &all), (key.name, &before));
    }
    assert_eq!(all.said().count(), LOG_KEYS.len());
}

#[test]
fn help_shows_the_keys_of_a_command() {
    for command in DiskCommand::ALL {
        let mut clap = clap::Command::new("x");
        clap.build();
        let shown = DiskArgument(command).parse_ref(&clap, None, "help".as_ref());
        let shown = shown.unwrap_err();
        assert_eq!(shown.kind(), ErrorKind::DisplayHelp);
        let shown = shown.to_string();
        for key in keys() {
            let there = shown.contains(&format!("  {}=\n      {}", key.name, key.help));
            assert_eq!(there, key.commands.contains(&command), "{}", key.name);
        }
    }
}

/// The table of all keys for the manual, in Markdown.
fn page() -> String {
    let mut text =
        "| key | value | default | commands | backends | what |\n|---|---|---|---|---|---|\n"
            .to_owned();
    let some = |names: Vec<&str>, all: usize| {
        if names.len() == all {
            "all".to_owned()
        } else {
            names.join(", ")
        }
    };
    for key in keys() {
        let commands = key.commands.iter().map(|command| command.name());
        let commands = some(commands.collect(), DiskCommand::ALL.len());
        let backends = key.backends.iter().map(|backend| backend.name());
        let backends = some(backends.collect(), BackendKind::ALL.len());
        let (name, help, default) = (key.name, key.help, key.default);
        let expected = key.value.expected();
        let _ = writeln!(
            text,
            "| `{name}` | {expected} | {default} | {commands} | {backends} | {help} |"
        );
    }
    text
}

#[test]
fn the_manual_has_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/disk-options.md");
    let manual = fs::read_to_string(path).unwrap();
    let page = page();
    assert!(
        manual.contains(&page),
        "docs/disk-options.md has another table; this is the one of the program:\n{page}"
    );
}

#[test]
fn the_error_for_a_mistyped_key_suggests_one_of_the_command() {
    let error_of = |text: &str, command| DiskSpec::parse(text, command).unwrap_err().to_string();
    for (wrong, command, right) in [
        ("read-only", DiskCommand::Run, Some("readonly")),
        ("cached", DiskCommand::Nbd, Some("cache")),
        ("sockets", DiskCommand::VhostUser, Some("socket")),
        // No key of this command.
        ("sockets", DiskCommand::Run, None),
        ("x", DiskCommand::Run, None),
    ] {
        let error = error_of(&format!("path=a,{wrong}=1"), command);
        // Without a similar one, all are listed.
        let told = match right {
            Some(right) => format!(": did you mean '{right}'? ("),
            None => "cache, readonly, serial".to_owned(),
        };
        assert!(error.contains(&told) && !error.contains('\n'), "{error}");
        assert_eq!(error.contains("did you mean"), right.is_some(), "{error}");
    }
}

#[test]
fn a_comma_in_a_value_is_doubled() {
    let spec = parse("path=a,,b,,,,c.img,log=,,l,serial=x,,").unwrap();
    assert_eq!(spec.path, Some(PathBuf::from("a,b,,c.img")));
    assert_eq!(spec.log, Some(PathBuf::from(",l")));
    assert_eq!(spec.serial.as_deref(), Some("x,"));
    let spec = parse("path=a,,,queues=2").unwrap();
    assert_eq!(
        (spec.path, spec.queues),
        (Some(PathBuf::from("a,")), Some(2))
    );
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
fn a_disk_at_a_point_is_writable_with_scratch_only() {
    let spec = parse("path=a.img,at=cid:7,readonly=on,log=l").unwrap();
    assert_eq!(spec.at, Some(Point::Cid(7)));
    let spec = parse("path=a,at=cid:7,scratch=on,readonly=off").unwrap();
    assert!(spec.scratch && !spec.read_only);
    assert!(matches!(
        parse("path=a,at=-15m").unwrap().at,
        Some(Point::Time(_))
    ));
    let spec = parse("path=a,at=cid:7,index-memory=2M").unwrap();
    assert_eq!(spec.log_options.index_memory, Some(2 << 20));
    for (wrong, part) in [
        ("path=a,at=noon", "at=noon: give cid:N, lsn:N"),
        ("path=a,at=cid:7,readonly=off", "leave readonly= out"),
        (
            "path=a,at=cid:7,scratch=on,readonly=on",
            "leave readonly= out",
        ),
        ("path=a,scratch=on", "give at=AT too"),
        ("path=a,at=cid:7,cache=unsafe", "leave cache="),
        ("path=a,at=cid:7,close-seconds=0", "leave cache="),
        ("path=a,at=cid:7,retain=1h", "the keys of the log out"),
        ("path=a,at=cid:7,backend=raw", "at= is for backend=wal"),
        ("backend=ram,size=1M,at=cid:7", "at= is for backend=wal"),
    ] {
        let error = parse(wrong).unwrap_err();
        assert!(error.contains(part), "{wrong}: {error}");
    }
}

#[test]
fn wrong_values_are_refused() {
    let wrong = "\
        path path= path=a,path=b path=a,queues=0 path=a,queues=65 path=a,queue-size=100 \
        path=a,queue-size=65536 path=a,block-size=1024 path=a,block-size=0x200 \
        path=a,in-order=yes path=a,worker-cpus= path=a,worker-cpus=1- path=a,worker-cpus=3-1 \
        path=a,worker-cpus=0+ path=a,worker-cpus=70000 path=a,worker-cpus=0-1024 \
        path=a,poll-usec=1001 path=a,readonly=yes path=a,serial= \
        path=a,serial=123456789012345678901 path=a,cache=none path=a,answer=never \
        path=a,answer=memory,cache=writethrough path=a,answer=memory,backend=raw \
        path=a,transport=ccw log=l backend=ram backend=ram,size=513 backend=ram,size=0 \
        backend=ram,size=1M,log=l backend=ram,path=x,size=1M path=a,size=1M \
        path=a,commit-wait-usec=1000001 path=a,commit-wait-usec=1.5 path=a,commit-wait-count=0 \
        path=a,close-seconds=86401 path=a,close-seconds=-1 path=a,backend=raw,close-seconds=1 \
        path=a,retain=some path=a,backend=raw,retain=all path=a,index-memory=0 \
        path=a,index-memory=1000000 path=a,backend=raw,index-memory=1M path=a,spill-limit=0 \
        path=a,backend=raw,spill-limit=1M path=a,socket= path=a,socket=s,port=1 \
        path=a,fabric=none,wwn=naa.0123456789abcdef path=a,port=65536 \
        path=a,port=1,address=localhost path=a,address=::1 \
        backend=ram,size=1M,commit-wait-usec=0 path=a,name= path=a,name=.. path=a,name=a/b \
        path=a,name=123456789012345678901234567890123 path=a,fabric=iscsi \
        path=a,wwn=naa.0123456789ABCDEF path=a,wwn=naa.0123456789abcde \
        path=a,command-timeout=86401 path=a,";
    for text in wrong.split_whitespace().chain([""]) {
        assert!(parse(text).is_err(), "{text:?} was accepted");
    }
}
