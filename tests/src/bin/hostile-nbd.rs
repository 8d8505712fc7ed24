//! Clients of an NBD server that harm whom they can, beside one that writes 4 KiB and flushes, again and again.
//!
//! ```text
//!   hostile-nbd SOCKET EXPORT [SECONDS]
//! ```
//! SOCKET is a Unix socket of any NBD server, EXPORT a disk of 64 MiB or more, whose first MiB is overwritten. Each attack
//! takes SECONDS, 5 without. A line for each tells how many commits the client made, how long the longest took, and how
//! many of the attackers the server has disconnected.

use std::env;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use walvisor_testkit::nbd::{self, FLUSH, READ, SimpleClient, WRITE};
use walvisor_testkit::noise;

/// What an NBD client may ask for.
const LONGEST: u32 = 32 << 20;
/// Connections of an attack: a listener of walvisor serves 128.
const ATTACKERS: usize = 100;

/// A way to attack: its name, and what a connection sends after the handshake.
type Attack = (&'static str, fn(&mut SimpleClient) -> io::Result<()>);

const ATTACKS: [Attack; 4] = [
    ("reads whose replies nobody reads", |client| {
        let read = nbd::request(0, READ, 0, 0, LONGEST);
        client.stream.write_all(&read.repeat(64))
    }),
    ("small reads whose replies nobody reads", |client| {
        let read = nbd::request(0, READ, 0, 0, 512);
        client.stream.write_all(&read.repeat(1 << 16))
    }),
    ("writes that are never sent in full", |client| {
        let write = nbd::request(0, WRITE, 0, 1 << 20, LONGEST);
        client.stream.write_all(&write)?;
        client.stream.write_all(&vec![7; LONGEST as usize - 1])
    }),
    ("garbage", |client| client.stream.write_all(&noise(4096))),
];

/// Commits for `time`: how many, and the longest.
fn commit(client: &mut SimpleClient, time: Duration) -> io::Result<(u32, Duration)> {
    let (began, mut commits, mut longest) = (Instant::now(), 0, Duration::ZERO);
    while began.elapsed() < time {
        let start = Instant::now();
        let offset = u64::from(commits % 256) * 4096;
        client.end(WRITE, offset, 4096, &mut [commits as u8; 4096], false)?;
        client.end(FLUSH, 0, 0, &mut [], false)?;
        longest = longest.max(start.elapsed());
        commits += 1;
    }
    Ok((commits, longest))
}

/// Whether the server has ended a connection, which ends now. What the server has sent is read for that.
fn end(mut stream: UnixStream) -> bool {
    let ended = is_ended(&mut stream);
    // Ends the thread that sends, too.
    let _ = stream.shutdown(Shutdown::Both);
    ended
}

fn is_ended(stream: &mut UnixStream) -> bool {
    let limit = stream.set_read_timeout(Some(Duration::from_millis(100)));
    let mut bytes = vec![0; 1 << 20];
    for _ in 0..256 {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return limit.is_ok() && error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
    false
}

/// Starts the connections of an attack, each in a thread, as a server that does not read holds it up.
fn attack(
    socket: &Path,
    export: &str,
    act: fn(&mut SimpleClient) -> io::Result<()>,
) -> Vec<UnixStream> {
    let connect = |_| {
        let mut client = SimpleClient::connect(socket, export).ok()?;
        let stream = client.stream.try_clone().ok()?;
        // The server ends it, or this process does.
        thread::spawn(move || act(&mut client));
        Some(stream)
    };
    (0..ATTACKERS).filter_map(connect).collect()
}

fn run(socket: &Path, export: &str, time: Duration) -> io::Result<()> {
    let tell = |name: &str, (commits, longest): (u32, Duration), ended: &str| {
        let rate = f64::from(commits) / time.as_secs_f64();
        let longest = longest.as_millis();
        println!("{name}: {rate:.0} commits/s, the longest {longest} ms{ended}");
    };
    let mut client = SimpleClient::connect(socket, export)?;
    tell("alone", commit(&mut client, time)?, "");
    for (name, act) in ATTACKS {
        let attackers = attack(socket, export, act);
        let count = attackers.len();
        let commits = commit(&mut client, time)?;
        let checks = attackers
            .into_iter()
            .map(|one| thread::spawn(move || end(one)));
        let checks: Vec<_> = checks.collect();
        let ended = checks.into_iter().filter_map(|check| check.join().ok());
        let ended = ended.filter(|ended| *ended).count();
        tell(
            name,
            commits,
            &format!(", {ended} of {count} attackers disconnected"),
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let (socket, export, seconds) = match &arguments[..] {
        [socket, export] => (socket, export, Ok(5)),
        [socket, export, seconds] => (socket, export, seconds.parse()),
        _ => {
            eprintln!("hostile-nbd: give SOCKET EXPORT [SECONDS]");
            return ExitCode::from(2);
        }
    };
    let Ok(seconds) = seconds else {
        eprintln!("hostile-nbd: SECONDS is a whole number");
        return ExitCode::from(2);
    };
    match run(&PathBuf::from(socket), export, Duration::from_secs(seconds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "hostile-nbd: {socket}: {error}: the client beside the attackers has lost its server"
            );
            ExitCode::from(1)
        }
    }
}
