//! Clients that harm whom they can, and the client beside them that writes 4 KiB and flushes, again
//! and again.
//!
//! ```text
//!   Attack ─ start ─▶ Attackers: a thread for each connection ─ end ─▶ how many the server has disconnected
//!   Victim ─ commit ─▶ how many commits in a time, and the longest
//! ```

pub mod nbd;
pub mod vhost_user;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

/// How long a request of the victim may take: then it has lost its server.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// What a commit writes.
pub const COMMIT_BYTES: usize = 4096;

/// A way to attack.
#[derive(Clone, Copy)]
pub struct Attack {
    /// What it does.
    pub name: &'static str,
    /// Connections that do it at the same time.
    pub attackers: usize,
    /// Whether a connection that the server has ended is made again.
    repeats: bool,
    connect: fn(&AttackTarget) -> io::Result<UnixStream>,
    /// What a connection does. It ends when the server or [`Attackers::end`] ends the connection,
    /// or before.
    act: fn(&mut UnixStream) -> io::Result<()>,
}

/// Whom an attack is for.
#[derive(Clone, Debug)]
pub struct AttackTarget {
    /// The server's socket.
    pub socket: PathBuf,
    /// The disk's name, over NBD.
    pub export: String,
}

impl AttackTarget {
    /// A disk at a socket. The name counts over NBD only.
    #[must_use]
    pub fn new(socket: &Path, export: &str) -> Self {
        Self {
            socket: socket.to_owned(),
            export: export.to_owned(),
        }
    }
}

/// How long an attack waits for its connections: a server that is busy with one may take no other.
const CONNECT_WAIT: Duration = Duration::from_secs(2);

/// What the connections of an attack share with who has started them.
#[derive(Default)]
struct AttackState {
    over: AtomicBool,
    /// Attackers that have had a connection, and those that could not get one.
    connected: AtomicUsize,
    refused: AtomicUsize,
    /// Connections that the server has ended.
    ended: AtomicUsize,
    /// The connection of each attacker.
    streams: Mutex<Vec<Option<UnixStream>>>,
}

impl AttackState {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<UnixStream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a connection, that of the attacker `at`. `None`: it can't be made, or the attack is
    /// over.
    fn connect(&self, attack: &Attack, target: &AttackTarget, at: usize) -> Option<UnixStream> {
        let stream = (attack.connect)(target).ok()?;
        self.lock()[at] = Some(stream.try_clone().ok()?);
        (!self.over.load(Ordering::SeqCst)).then_some(stream)
    }

    fn fight(&self, attack: &Attack, target: &AttackTarget, at: usize) {
        let Some(mut stream) = self.connect(attack, target, at) else {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return;
        };
        self.connected.fetch_add(1, Ordering::SeqCst);
        loop {
            // The server ends the connection, or the attack's end does.
            let _ = (attack.act)(&mut stream);
            let hung_up = wait_for_hang_up(&stream);
            if hung_up.is_err() || self.over.load(Ordering::SeqCst) {
                return;
            }
            self.ended.fetch_add(1, Ordering::SeqCst);
            if !attack.repeats {
                return;
            }
            match self.connect(attack, target, at) {
                Some(next) => stream = next,
                None => return,
            }
        }
    }
}

/// Waits without reading until either side has ended the connection.
fn wait_for_hang_up(stream: &UnixStream) -> io::Result<()> {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    Ok(poll(&mut fds, None).map(drop)?)
}

/// The connections of an attack that goes on.
pub struct Attackers {
    battle: Arc<AttackState>,
}

impl Attackers {
    /// Starts an attack, each connection in a thread, as a server that does not read holds it up.
    #[must_use]
    pub fn start(attack: &'static Attack, target: &AttackTarget) -> Self {
        let battle = Arc::<AttackState>::default();
        battle.lock().resize_with(attack.attackers, || None);
        let fight = |at| {
            let (battle, target) = (Arc::clone(&battle), target.clone());
            thread::spawn(move || battle.fight(attack, &target, at))
        };
        (0..attack.attackers).for_each(|at| drop(fight(at)));
        let began = Instant::now();
        let there =
            || [&battle.connected, &battle.refused].map(|count| count.load(Ordering::SeqCst));
        while there().iter().sum::<usize>() < attack.attackers && began.elapsed() < CONNECT_WAIT {
            thread::sleep(Duration::from_millis(1));
        }
        Self { battle }
    }

    /// How many have attacked so far.
    #[must_use]
    pub fn count(&self) -> usize {
        self.battle.connected.load(Ordering::SeqCst)
    }

    /// Ends the attack. Returns how many connections the server has ended before.
    #[must_use]
    pub fn end(self) -> usize {
        let ended = self.battle.ended.load(Ordering::SeqCst);
        self.battle.over.store(true, Ordering::SeqCst);
        for stream in self.battle.lock().iter().flatten() {
            // Fails if the server has ended it, which is just as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
        // A thread that waits for a connection ends when it has got it.
        ended
    }
}

/// The client beside the attackers.
pub trait Victim {
    /// Writes [`COMMIT_BYTES`] bytes, and flushes. `number` counts the commits.
    ///
    /// # Errors
    /// If the server fails it, or is gone.
    fn commit(&mut self, number: u32) -> io::Result<()>;
}

/// What a victim has done in a time.
#[derive(Clone, Copy, Debug)]
pub struct Commits {
    /// How many a second.
    pub per_s: f64,
    /// The longest.
    pub longest: Duration,
}

impl Commits {
    /// Lets `victim` commit for `time`.
    ///
    /// # Errors
    /// Of the victim.
    pub fn count(victim: &mut dyn Victim, time: Duration) -> io::Result<Self> {
        let (began, mut commits, mut longest) = (Instant::now(), 0, Duration::ZERO);
        while began.elapsed() < time {
            let start = Instant::now();
            victim.commit(commits)?;
            longest = longest.max(start.elapsed());
            commits += 1;
        }
        Ok(Self {
            per_s: f64::from(commits) / began.elapsed().as_secs_f64(),
            longest,
        })
    }
}
