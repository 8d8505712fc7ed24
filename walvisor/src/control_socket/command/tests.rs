use std::fmt::Write;
use std::fs;

use walvisor_testkit::Random;

use super::*;

fn parse(line: &str) -> Result<ControlCommand, ControlError> {
    ControlRequest::parse(line.as_bytes()).command
}

fn every_command() -> Vec<ControlCommand> {
    fn disk<T: From<&'static str>>() -> Option<T> {
        Some("a \"b\"\n.img".into())
    }
    vec![
        ControlCommand::Snapshots {
            disk: Some(DiskChoice::Image {
                image: "/a.img".into(),
                log: "/a.img.wal".into(),
            }),
        },
        ControlCommand::Stats {
            format: StatsFormat::Json,
        },
        ControlCommand::Stats {
            format: StatsFormat::Prometheus,
        },
        ControlCommand::Pause { disk: None },
        ControlCommand::Pause { disk: disk() },
        ControlCommand::Resume { disk: disk() },
        ControlCommand::Hold {
            log: "/a.wal".into(),
        },
        ControlCommand::Resize {
            disk: disk(),
            size_bytes: u64::MAX,
        },
        ControlCommand::SetCache {
            disk: None,
            cache: CacheChoice::Writethrough,
        },
        ControlCommand::SetLimit(LimitChange {
            disk: disk(),
            ops_per_second: Some(1),
            bytes_burst: Some(0),
            ..LimitChange::default()
        }),
        ControlCommand::Checkpoint {
            disk: disk(),
            give_up_history: true,
        },
        ControlCommand::SetRetain {
            disk: disk(),
            retain: "24h".to_owned(),
            give_up_history: true,
        },
        ControlCommand::AddDisk {
            spec: "path=a,,b,socket=s".to_owned(),
        },
        ControlCommand::RemoveDisk {
            disk: "a,b".to_owned(),
            keep_records: true,
        },
        ControlCommand::Export {
            disk: disk(),
            at: None,
            output: PathBuf::new(),
            force: false,
        },
        ControlCommand::Look(LookRequest {
            disk: disk(),
            at: "-15m".to_owned(),
            socket: "/s".into(),
            scratch: true,
            keep: false,
        }),
        ControlCommand::Restore {
            disk: disk(),
            at: "cid:1".to_owned(),
        },
        ControlCommand::Unlook { look: "/s".into() },
        ControlCommand::Looks {},
        ControlCommand::Exports {},
        ControlCommand::ExportCancel {
            disk: "a".to_owned(),
        },
        ControlCommand::Snapshot {
            disk: disk(),
            name: "one".to_owned(),
            alone: true,
        },
        ControlCommand::Snapshots { disk: None },
        ControlCommand::SnapshotDelete {
            disk: disk(),
            name: "one".to_owned(),
        },
        ControlCommand::Mark {
            disk: disk(),
            text: "before".to_owned(),
        },
        ControlCommand::Config {
            file: PathBuf::new(),
            saved: vec!["a".to_owned()],
        },
        ControlCommand::Shutdown { now: true },
    ]
}

#[test]
fn every_command_is_known_by_its_name() {
    let wrong = |name: &str| format!("{{\"execute\":\"{name}\",\"arguments\":{{\"no such\":[]}}}}");
    for name in ControlCommand::names() {
        let error = parse(&wrong(name)).unwrap_err();
        assert_eq!(error.class, "GenericError", "{error}");
        assert!(
            error.text.starts_with(&format!("arguments of {name}: ")),
            "{error}"
        );
    }
    let error = parse(&wrong("reboot")).unwrap_err();
    assert_eq!(error.class, "CommandNotFound");
    assert!(
        error
            .text
            .ends_with("looks, exports, export-cancel, shutdown"),
        "{error}"
    );
    let lines = every_command().into_iter().map(|command| command.to_line());
    let lines: Vec<_> = lines
        .map(|line| serde_json::from_str::<Value>(&line).unwrap())
        .collect();
    for name in ControlCommand::names() {
        assert!(lines.iter().any(|line| line["execute"] == *name), "{name}");
    }
}

#[test]
fn a_request_is_read_as_it_was_written() {
    for command in every_command() {
        let line = command.to_line();
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(parse(&line), Ok(command), "{line}");
    }
}

/// What older clients and programs of other people send, and older servers read.
#[test]
fn a_request_is_written_as_before() {
    fn disk<T: From<&'static str>>() -> Option<T> {
        Some("a".into())
    }
    for (command, arguments) in [
        (
            ControlCommand::Stats {
                format: StatsFormat::Json,
            },
            r#"{"format":"json"},"execute":"stats""#,
        ),
        (
            ControlCommand::Pause { disk: None },
            r#"{"disk":null},"execute":"pause""#,
        ),
        (
            ControlCommand::Resize {
                disk: disk(),
                size_bytes: 512,
            },
            r#"{"disk":"a","size_bytes":512},"execute":"resize""#,
        ),
        (
            ControlCommand::SetLimit(LimitChange {
                disk: disk(),
                weight: Some(7),
                ..LimitChange::default()
            }),
            r#"{"disk":"a","weight":7},"execute":"limits""#,
        ),
        (
            ControlCommand::Export {
                disk: disk(),
                at: None,
                output: "the client's".into(),
                force: true,
            },
            r#"{"at":null,"disk":"a"},"execute":"export""#,
        ),
        (
            ControlCommand::Config {
                file: "the client's".into(),
                saved: Vec::new(),
            },
            r#"{"saved":[]},"execute":"config""#,
        ),
        (
            ControlCommand::Look(LookRequest {
                disk: None,
                at: "cid:1".to_owned(),
                socket: "/s".into(),
                scratch: false,
                keep: true,
            }),
            r#"{"at":"cid:1","disk":null,"keep":true,"scratch":false,"socket":"/s"},"execute":"look""#,
        ),
        (ControlCommand::Looks {}, r#"{},"execute":"looks""#),
    ] {
        assert_eq!(command.to_line(), format!("{{\"arguments\":{arguments}}}"));
    }
}

#[test]
fn the_page_of_the_protocol_has_every_command_and_argument() {
    let mut table = "| `execute` | `arguments` |\n|---|---|\n".to_owned();
    for name in ControlCommand::names() {
        let arguments = ControlCommand::arguments(name).iter();
        let arguments: Vec<_> = arguments.map(|name| format!("`{name}`")).collect();
        let _ = writeln!(table, "| `{name}` | {} |", arguments.join(", "));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/control-protocol.md");
    let page = fs::read_to_string(path).unwrap();
    assert!(
        page.contains(&table),
        "docs/control-protocol.md has another table; this is the one of the program:\n{table}"
    );
}

#[test]
fn wrong_requests_are_named() {
    for (line, part) in [
        ("", "not a request"),
        ("stats", "not a request"),
        ("{\"execute\": \"stats\"} x", "trailing"),
        ("[1]", "not a request"),
        ("{\"execute\": \"st\\ud800\"}", "not a request"),
        ("{\"execute\": 7}", "not a request"),
        ("{\"execute\": \"stats\", \"extra\": 1}", "extra"),
        (
            "{\"execute\": \"stats\", \"arguments\": 1}",
            "not a request",
        ),
        ("{\"execute\": \"reboot\"}", "unknown command 'reboot'"),
        (
            "{\"execute\": \"pause\", \"arguments\": {\"x\": 1}}",
            "unknown field `x`",
        ),
        ("{\"execute\": \"resize\"}", "size_bytes"),
        (
            "{\"execute\": \"resize\", \"arguments\": {\"size_bytes\": -1}}",
            "-1",
        ),
        (
            "{\"execute\": \"resize\", \"arguments\": {\"size_bytes\": 1e300}}",
            "floating point",
        ),
        (
            "{\"execute\": \"resize\", \"arguments\": {\"size_bytes\": 18446744073709551616}}",
            "u64",
        ),
        (
            "{\"execute\": \"cache\", \"arguments\": {\"cache\": \"unsafe\"}}",
            "unsafe",
        ),
        (
            "{\"execute\": \"limits\", \"arguments\": {\"disk\": 1}}",
            "expected a string",
        ),
    ] {
        let error = parse(line).unwrap_err().to_string();
        assert!(
            error.contains(part) && !error.contains('\n'),
            "{line}: {error}"
        );
    }
}

/// The depth of a parsed value.
fn depth_of(value: &Value) -> usize {
    let inner = |values: &mut dyn Iterator<Item = &Value>| values.map(depth_of).max().unwrap_or(0);
    match value {
        Value::Array(values) => 1 + inner(&mut values.iter()),
        Value::Object(values) => 1 + inner(&mut values.values()),
        _ => 0,
    }
}

#[test]
fn an_answer_carries_the_id_of_its_request() {
    let request = ControlRequest::parse(b"{\"execute\": \"pause\", \"id\": [1, null]}");
    let answer = request.answer(Ok(json!({})));
    assert_eq!(answer, b"{\"id\":[1,null],\"return\":{}}\n");
    let answer = request.answer(Err(ControlError::new("no\nway")));
    let text = String::from_utf8(answer).unwrap();
    assert_eq!(
        text,
        "{\"error\":{\"class\":\"GenericError\",\"desc\":\"no way\"},\"id\":[1,null]}\n"
    );
}

/// Requests with bytes changed, removed or doubled: each parses as a command or gives an error of
/// one line, and a command reads the same after it is written again.
#[test]
fn mutated_requests_parse_or_are_errors() {
    let mut random = Random(7);
    let mut random = |below: usize| random.below(below as u64) as usize;
    let seeds: Vec<String> = every_command()
        .iter()
        .map(ControlCommand::to_line)
        .collect();
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..50_000 {
        let mut line = seeds[random(seeds.len())].clone().into_bytes();
        for _ in 0..random(4) {
            let at = random(line.len());
            match random(5) {
                0 => line[at] = random(256) as u8,
                1 => line.truncate(at.max(1)),
                2 => drop(line.remove(at)),
                3 => line.insert(at, b"{}[]\",:0123456789eE+-.ntf\\u \xff"[random(29)]),
                _ => line.extend_from_within(at..),
            }
            if line.is_empty() {
                line.push(b' ');
            }
        }
        if let Ok(value) = serde_json::from_slice::<Value>(&line) {
            // Of two fields with one name a value keeps the last.
            assert!(depth(&line) >= depth_of(&value));
        }
        let request = ControlRequest::parse(&line);
        let answer = match &request.command {
            Ok(command) => {
                accepted += 1;
                assert_eq!(parse(&command.to_line()).as_ref(), Ok(command));
                request.answer(Ok(Value::Null))
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().contains('\n'), "{error}");
                request.answer(Err(error.clone()))
            }
        };
        let ends = answer.iter().filter(|byte| **byte == b'\n').count();
        assert!(ends == 1 && answer.ends_with(b"\n"));
        assert!(serde_json::from_slice::<Value>(&answer).is_ok());
    }
    assert!(accepted > 5_000 && refused > 5_000, "{accepted} {refused}");
}
