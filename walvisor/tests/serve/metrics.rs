//! `--metrics-listen`: metrics over HTTP, for Prometheus and for strangers.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use walvisor_testkit::http::get;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::process::Process;
use walvisor_testkit::wait_until;
use walvisor_tests::{have, metrics_complaints, run_sessions};

use super::vhost_user::Client;
use super::{Daemon, client, create, ctl, errors, refused, serve, serve_telling, test_dir};

const PAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations/prometheus");

/// An address at which nobody listens.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

/// A daemon with disks of two doors that have done some work, and that serves metrics at `address`.
fn worked(dir: &Path, address: &str) -> Daemon {
    create(dir, "a.img", "1M --retain 1h");
    create(dir, "b.img", "1M --log a.img.wal");
    fs::create_dir(dir.join("archive")).unwrap();
    let arguments = format!(
        "--disk path=a.img,door=nbd,socket=n,archive=file://{} --disk \
         path=b.img,log=a.img.wal,door=vhost-user,socket=v --metrics-listen {address} --control \
         ctl",
        dir.join("archive").display()
    );
    let daemon = serve(dir, &arguments, 2);
    let mut client = RawClient::extended_to(&dir.join("n"), "a.img");
    client.write(1, 0, &[1; 4096]);
    client.flush(2);
    let mut client = Client::connect(&dir.join("v"), 1);
    client.write(0, 0, 0, &[2; 4096]);
    client.flush(0, 1);
    client.kick(0);
    client.finish(0, 2);
    ctl(dir, "snapshot before");
    daemon
}

/// The texts of all keys `key` in a JSON or YAML file.
fn expressions(value: &Value, key: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get(key).and_then(Value::as_str).map(str::to_owned));
            fields
                .values()
                .for_each(|value| expressions(value, key, found));
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| expressions(value, key, found)),
        _ => {}
    }
}

/// A text as part of a URL.
fn escaped(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// Prometheus scrapes a daemon as the pages say, finds all that dashboard and alerts ask for, and
/// its linter has nothing to say about the names.
#[test]
fn prometheus_and_the_dashboard_find_what_they_ask_for() {
    if !have("promtool", "prometheus") {
        return;
    }
    let dir = &test_dir();
    let address = free_address();
    let daemon = worked(dir, &address);
    let served = get(connect(&address), "/metrics").unwrap();

    assert_eq!(metrics_complaints(&served), "");

    // The pages, with this daemon's address.
    let page = |name: &str| fs::read_to_string(Path::new(PAGES).join(name)).unwrap();
    fs::write(dir.join("alerts.yml"), page("alerts.yml")).unwrap();
    let config = page("prometheus.yml").replace("127.0.0.1:9790", &address);
    assert!(config.contains(&address), "{config}");
    fs::write(dir.join("prometheus.yml"), config.replace("15s", "1s")).unwrap();
    client(dir, "promtool", &["check", "config", "prometheus.yml"]);
    let web = free_address();
    let mut prometheus = Command::new("prometheus");
    prometheus.current_dir(dir).stdin(Stdio::null());
    prometheus.args(["--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"]);
    prometheus.arg(format!("--web.listen-address={web}"));
    let log = fs::File::create(dir.join("prometheus.log")).unwrap();
    let _prometheus = Process::spawn(prometheus.stderr(log));
    let api = |path: &str| -> Option<Value> {
        let stream = TcpStream::connect(&web).ok()?;
        let body = get(stream, &format!("/api/v1/{path}")).ok()?;
        serde_json::from_str(&body).ok()
    };
    let query = |expression: &str| {
        let answer = api(&format!("query?query={}", escaped(expression)))?;
        Some(answer["data"]["result"].as_array()?.len())
    };
    // Two scrapes: a rate needs as many.
    wait_until("the scrapes", || {
        query("count_over_time(walvisor_disk_info[5m]) > 1") == Some(2)
    });

    let dashboard: Value = serde_json::from_str(&page("dashboard.json")).unwrap();
    let mut shown = Vec::new();
    expressions(&dashboard["panels"], "expr", &mut shown);
    assert!(shown.len() > 10, "{shown:?}");
    for expression in &mut shown {
        *expression = expression
            .replace("$__rate_interval", "5m")
            .replace("$instance", ".*");
        let found = query(expression);
        assert!(found > Some(0), "{expression}: {found:?}");
    }
    let rules = api("rules").unwrap();
    let mut alerts = Vec::new();
    expressions(&rules, "query", &mut alerts);
    assert_eq!(alerts.len(), page("alerts.yml").matches("alert:").count());
    for alert in &alerts {
        assert_eq!(query(alert), Some(0), "{alert}: there is no trouble");
    }
    // A name that is not exported gives nothing, as no trouble does.
    let kinds: BTreeMap<_, _> = served
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    for expression in shown.iter().chain(&alerts) {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("walvisor_")) {
            let histogram = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| name.strip_suffix(end));
            let of_histogram = histogram.and_then(|name| kinds.get(name));
            assert!(
                kinds.contains_key(name) || of_histogram == Some(&"histogram"),
                "{name} in {expression}"
            );
        }
    }
    // An alert that has no time to wait for.
    assert!(daemon.stop().is_empty());
    wait_until("the end of the daemon", || {
        query("up{job=\"walvisor\"} == 0") == Some(1)
    });
}

#[test]
fn the_socket_of_the_metrics_is_one_of_the_daemons() {
    let dir = &test_dir();
    create(dir, "a.img", "1M");
    let arguments = "--disk path=a.img,socket=n --metrics-listen unix:m --mode 640";
    let scrape = || get(UnixStream::connect(dir.join("m")).unwrap(), "/metrics").unwrap();
    let daemon = Daemon::start(dir, arguments);
    let mode = fs::metadata(dir.join("m")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert!(scrape().contains("walvisor_disk_info{disk=\"a.img\""));
    // What is served cannot be taken, and what a killed daemon has left can.
    create(dir, "b.img", "1M");
    let other = "serve nbd --disk path=b.img,socket=o --metrics-listen unix:m";
    refused(dir, other, 1, &["socket 'm': a server listens there"]);
    daemon.kill();
    // The child that removes names may be at it.
    let daemon = Daemon::start(dir, arguments);
    assert!(scrape().contains("walvisor_disk_info{disk=\"a.img\""));
    assert_eq!(daemon.stop(), "");
    assert!(!dir.join("m").exists() && !dir.join("n").exists());
    run_sessions("metrics", dir, []);
    assert!(!dir.join("n").exists());
}

/// The file of `--config` may say where. It is read again by a process that may make no socket.
#[test]
fn a_configuration_file_says_where_metrics_are() {
    let dir = &test_dir();
    create(dir, "a.img", "1M");
    let address = free_address();
    let port = address.rsplit(':').next().unwrap();
    let pool = |listen: &str| {
        let disk = "[[disk]]\npath = 'a.img'\ndoor = 'nbd'\nsocket = 'n'\n";
        let text = format!("[defaults]\nmetrics-listen = '{listen}'\n{disk}");
        fs::write(dir.join("pool.toml"), text).unwrap();
    };
    pool(&format!("localhost:{port}"));
    let arguments = "--config pool.toml --metrics-listen unix:m";
    let daemon = serve_telling(dir, arguments, 1);
    let by_port = get(connect(&address), "/metrics").unwrap();
    let by_path = get(UnixStream::connect(dir.join("m")).unwrap(), "/metrics").unwrap();
    assert_eq!(by_port.lines().count(), by_path.lines().count());
    pool("localhost:1");
    daemon.signal(Signal::HUP);
    wait_until("the warning", || {
        errors(dir).contains("metrics-listen has changed; it takes effect at the next start")
    });
    get(connect(&address), "/metrics").unwrap();
    assert_eq!(daemon.stop(), "");
}
