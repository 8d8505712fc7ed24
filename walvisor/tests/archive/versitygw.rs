//! A real S3 server: versitygw, over a directory.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor_testkit::s3::KEYS;
use walvisor_testkit::{Process, wait_until};
use walvisor_tests::have;

/// The server. Dropping it ends it.
pub struct Versitygw {
    program: PathBuf,
    /// Its objects are below this directory, and its messages beside it.
    objects: PathBuf,
    port: u16,
    process: Option<Process>,
}

impl Versitygw {
    /// Starts a server with an empty bucket `bucket` in `dir`. `None`, after printing
    /// `skipped: why`, if it can't be built here.
    pub fn start(dir: &Path) -> Option<Self> {
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("versitygw-1.8.0");
        fs::create_dir_all(&built).unwrap();
        if !have("go", "golang-go") {
            return None;
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/archive/versitygw.sh");
        let mut build = Command::new("timeout");
        build.args(["1200", "sh", script]).current_dir(&built);
        let output = build.output().expect("timeout(1) starts");
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let why = errors.lines().last().unwrap_or("it took too long");
            println!("skipped: versitygw can't be built: {why}");
            return None;
        }
        let objects = dir.join("objects");
        fs::create_dir_all(objects.join("bucket")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut server = Self {
            program: built.join("versitygw"),
            objects,
            port: free.local_addr().unwrap().port(),
            process: None,
        };
        drop(free);
        server.restart();
        Some(server)
    }

    /// The address of an archive in the bucket.
    pub fn url(&self, name: &str) -> String {
        let port = self.port;
        format!("s3://bucket/{name}?endpoint=http://127.0.0.1:{port}")
    }

    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again, if it does not run, and waits until it answers.
    pub fn restart(&mut self) {
        if self.is_running() {
            return;
        }
        let messages = self.objects.with_extension("log");
        let messages = File::options().create(true).append(true).open(messages);
        let messages = messages.unwrap();
        let mut command = Command::new(&self.program);
        command
            .arg("--port")
            .arg(format!("127.0.0.1:{}", self.port))
            .args(["--access", KEYS[0].1, "--secret", KEYS[1].1])
            .args(["--region", KEYS[2].1, "posix"])
            .arg(&self.objects)
            .stdout(Stdio::from(messages.try_clone().unwrap()))
            .stderr(Stdio::from(messages));
        self.process = Some(Process::spawn(&mut command));
        wait_until("the server", || {
            std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok()
        });
    }
}
