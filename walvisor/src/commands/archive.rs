//! `walvisor archive`: a log in an object store, and back.

mod plan;

use std::fs::File;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use clap::{Args, Subcommand};
use rustix::fs::Mode;
use rustix::io::Errno;
use serde_json::{Value, json};
use walvisor_archive::{
    Archive, ArchiveUrl, ErrorKind, ExpireOptions, ExpireReport, Replica, ReplicaReport,
    RestoreReport, RestoredDisk, Tick, UploadOptions, Uploader, expire, restore, serve, survey,
    verify,
};
use walvisor_storage::{Commit, LogRoot, Point};
use walvisor_vmm::seccomp::{self, Seccomp, SyscallProfile};

use super::CommandError;
use super::disk::print;
use super::process::seccomp_modes;
use crate::archiving::{LAST_PUSH, LOST, PushProgress, awaited, open_progress};
use crate::disk_spec;
use crate::landlock::{AllowedPaths, Landlock};
use crate::point::{time_text, unix_us};
use crate::progress::with_bar;
use crate::size::human_size;

/// Arguments of `walvisor archive`.
#[derive(Debug, Args)]
pub struct ArchiveArguments {
    #[command(subcommand)]
    action: ArchiveAction,
}

/// What to do with an archive.
#[derive(Debug, Subcommand)]
enum ArchiveAction {
    /// Copy a log and the images of its disks to an archive, whether or not they are in use.
    /// Another push goes on where the last one ended.
    Push {
        /// The log directory.
        log: PathBuf,
        /// The archive: s3://BUCKET/PREFIX[?endpoint=URL&region=NAME] or file:///DIRECTORY.
        url: String,
        /// Go on with what the log gets, until the process is ended.
        #[arg(long)]
        follow: bool,
        /// With --follow, send the rest once standard input has ended, within 10 seconds, and end.
        #[arg(long, requires = "follow")]
        until_eof: bool,
        /// A descriptor for the progress, from the process whose log it is. The push begins once it
        /// has read a byte from standard input.
        #[arg(long, hide = true)]
        progress_fd: Option<u32>,
        /// Write to standard output up to which LSN the archive has everything: 8 bytes each.
        #[arg(long, hide = true, requires = "progress_fd", conflicts_with = "json")]
        acknowledge: bool,
        /// Requests wait for what is acknowledged: send what is new at each byte from standard
        /// input.
        #[arg(long, hide = true, requires = "acknowledge")]
        sync: bool,
        /// Where images may be that come to the log later.
        #[arg(long, hide = true)]
        images_in: Vec<PathBuf>,
        /// With --follow, how often to send what is new, such as 1s or 500ms.
        #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
        interval: Duration,
        /// Copy the images again after this time: a restore then needs less of the log. Chunks that
        /// have not changed are not sent again.
        #[arg(long, value_name = "TIME", value_parser = time, default_value = "24h")]
        base_every: Duration,
        /// Begin anew although another machine has written the archive since, with what this log
        /// does not have.
        #[arg(long)]
        take_over: bool,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON: one object per line, whenever something was sent.
        #[arg(long)]
        json: bool,
    },
    /// Show which points of which disks an archive has.
    Status {
        /// The archive.
        url: String,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Bring back all disks of an archived log, and the log, in a new directory. Say it again if it
    /// was ended too early.
    Restore {
        /// The archive.
        url: String,
        /// The directory to make.
        dir: PathBuf,
        #[command(flatten)]
        at: PointArgument,
        /// Let the disks be used as soon as the log is there, and fetch what their requests wait
        /// for before the rest. Keep this running until it ends: without it, what was not fetched
        /// can't be read.
        #[arg(long)]
        serve: bool,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Keep a replica of all disks of an archived log in a directory, which follows the archive
    /// until the process is ended. Its disks can be read meanwhile, but not written.
    Follow {
        /// The archive.
        url: String,
        /// The replica's directory, new or from an earlier follow.
        dir: PathBuf,
        /// How often to ask the archive for what is new, such as 1s or 500ms.
        #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
        interval: Duration,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON: one object per line, whenever something has come.
        #[arg(long)]
        json: bool,
    },
    /// Make a replica a log of its own, with all that the archive has. A push to the archive from
    /// anywhere else is stopped first.
    Promote {
        /// The archive.
        url: String,
        /// The replica's directory. Nobody may follow there any more.
        dir: PathBuf,
        /// Fetch all disks first, if no replica is there.
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Fetch and check everything that a restore needs, without writing it anywhere.
    Verify {
        /// The archive.
        url: String,
        #[command(flatten)]
        at: PointArgument,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove everything that no kept point needs. A push may go on meanwhile.
    Expire {
        /// The archive.
        url: String,
        #[command(flatten)]
        kept: KeptPoints,
        /// Only show what would be removed.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confined: Confinement,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say what a month of an archive takes and costs, for a rate of writes.
    Plan(plan::PlanArguments),
}

/// Which points stay when others expire.
#[derive(Clone, Copy, Debug, Args)]
struct KeptPoints {
    /// Keep all points of this time up to now, such as 30d. The newest copy of the images and the
    /// log since stay in any case.
    #[arg(long, value_name = "TIME", value_parser = time)]
    keep: Duration,
    /// Also keep an older point of each of the last N days (UTC): that of the day's last copy of
    /// the images.
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_daily: u32,
    /// Keep chunks that nothing needs for this time after they were sent: longer than a copy of
    /// the images takes, which may be under way.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "24h")]
    grace: Duration,
}

/// What the process gives up.
#[derive(Clone, Copy, Debug, Args)]
struct Confinement {
    /// Seccomp filter against system calls that the process does not need: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = seccomp_modes())]
    seccomp: Seccomp,
    /// Whether the process gives up the files and ports that it does not need.
    #[arg(long, value_enum, default_value_t)]
    landlock: Landlock,
}

impl Confinement {
    /// Gives up all files but those in `places`, and the system calls that no archive needs.
    fn confine(&self, url: &ArchiveUrl, places: &AllowedPaths) -> Result<(), CommandError> {
        places.restrict(self.landlock);
        if url.looks_up_names() {
            // Loads what the C library looks names up with, which is not allowed afterwards. The
            // name exists nowhere (RFC 2606, section 2).
            let _ = ("walvisor.invalid", 0).to_socket_addrs();
        }
        let restricted = seccomp::restrict(self.seccomp, SyscallProfile::Archive, false);
        restricted.map_err(CommandError::failed)
    }
}

/// A point of the log's history.
#[derive(Clone, Copy, Debug, Args)]
struct PointArgument {
    /// As of this point: cid:N, lsn:N, snapshot:NAME, a time such as 12:03, 'yesterday 12:03' or
    /// 2026-11-22T12:03:00Z, a time before now such as -15m, or newest.
    #[arg(
        long,
        value_name = "AT",
        allow_hyphen_values = true,
        default_value = "newest"
    )]
    at: Point,
}

/// A time such as 1s or 24h.
fn time(text: &str) -> Result<Duration, String> {
    disk_spec::time(text).ok_or_else(|| "give a time such as 500ms, 1s or 24h".to_owned())
}

impl From<walvisor_archive::Error> for CommandError {
    fn from(error: walvisor_archive::Error) -> Self {
        Self::failed(error)
    }
}

/// Carries out `walvisor archive`.
///
/// # Errors
/// One line: what, where, what to do.
pub fn run(arguments: &ArchiveArguments) -> Result<(), CommandError> {
    // What an archive in a directory has is for who may read the log and the images.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    match &arguments.action {
        ArchiveAction::Push {
            log,
            url,
            follow,
            until_eof,
            progress_fd,
            acknowledge,
            sync,
            images_in,
            interval,
            base_every,
            take_over,
            confined,
            json,
        } => {
            let options = UploadOptions {
                base_every: Some(*base_every),
                copy_once: !follow,
                take_over: *take_over,
                check_each: *sync,
            };
            let url = address(url)?;
            let progress = progress_fd.map(open_progress).transpose();
            let progress = progress.map_err(CommandError::failed)?;
            if progress.is_some() && !next_bytes_come() {
                // The log was not opened.
                return Ok(());
            }
            let mut places = places_of(&url, true);
            places.read(log);
            images_in
                .iter()
                .for_each(|directory| places.read(directory));
            for image in LogRoot::read(log)?.images() {
                // And those of disks that come to the log later.
                places.read(image.path.parent().unwrap_or(&image.path));
                places.read(&image.path);
            }
            confined.confine(&url, &places)?;
            let archive = Archive::open(&url)?;
            if *follow {
                let push = FollowingPush {
                    archive: &archive,
                    log,
                    options,
                    interval: *interval,
                    json: *json,
                    input: until_eof.then(InputWatch::start),
                    acknowledged: acknowledge.then_some(0),
                    lost: false,
                    sync: *sync,
                    told: PushProgress::default(),
                    progress,
                };
                push.run()
            } else {
                push(&archive, log, options, *json)
            }
        }
        ArchiveAction::Status {
            url,
            confined,
            json,
        } => status(&opened(url, None, false, confined)?, *json),
        ArchiveAction::Restore {
            url,
            dir,
            at,
            serve,
            confined,
            json,
        } => {
            let archive = opened(url, Some(dir), true, confined)?;
            if *serve {
                return restore_serving(&archive, dir, at.at, *json);
            }
            let done = with_bar("restoring", |progress| {
                restore(&archive, dir, at.at, progress)
            })?;
            report_restored(&done, *json);
            Ok(())
        }
        ArchiveAction::Follow {
            url,
            dir,
            interval,
            confined,
            json,
        } => follow_archive(
            &opened(url, Some(dir), true, confined)?,
            dir,
            *interval,
            *json,
        ),
        ArchiveAction::Promote {
            url,
            dir,
            yes,
            confined,
            json,
        } => {
            if !yes && !Replica::is_at(dir) {
                return Err(CommandError::Failed(format!(
                    "{}: no replica is there, such as 'walvisor archive follow' makes; to fetch all \
                     disks to it now, and to take the archive from the host that writes it, add --yes",
                    dir.display()
                )));
            }
            promote(&opened(url, Some(dir), true, confined)?, dir, *json)
        }
        ArchiveAction::Verify {
            url,
            at,
            confined,
            json,
        } => {
            let archive = opened(url, None, true, confined)?;
            let done = with_bar("verifying", |progress| verify(&archive, at.at, progress))?;
            report_verified(&done, *json);
            Ok(())
        }
        ArchiveAction::Expire {
            url,
            kept,
            dry_run,
            confined,
            json,
        } => {
            let url = address(url)?;
            confined.confine(&url, &places_of(&url, true))?;
            let archive = Archive::open(&url)?;
            let options = ExpireOptions {
                keep: kept.keep,
                keep_daily: kept.keep_daily,
                grace: kept.grace,
                dry_run: *dry_run,
            };
            report_expired(&expire(&archive, &options)?, *dry_run, *json);
            Ok(())
        }
        ArchiveAction::Plan(plan) => {
            plan::run(plan);
            Ok(())
        }
    }
}

/// The address in an argument. Clap would repeat it, and it may have a key where none belongs.
fn address(url: &str) -> Result<ArchiveUrl, CommandError> {
    let parsed = url.parse();
    parsed.map_err(|error: walvisor_archive::Error| CommandError::Usage(error.to_string()))
}

/// Opens an archive to read it. `dir`: the directory that a restore makes. `leased`: it is
/// read for long, and what is needed is kept meanwhile.
fn opened(
    url: &str,
    dir: Option<&Path>,
    leased: bool,
    confined: &Confinement,
) -> Result<Archive, CommandError> {
    let url = address(url)?;
    // A restore leaves a note there of what it needs.
    let mut places = places_of(&url, leased);
    if let Some(dir) = dir {
        let made = std::fs::create_dir_all(dir);
        made.map_err(|error| {
            CommandError::Failed(format!(
                "{}: can't make the directory: {error}",
                dir.display()
            ))
        })?;
        places.tree(dir);
    }
    confined.confine(&url, &places)?;
    Ok(Archive::open(&url)?)
}

/// What a process may reach that uses an archive.
fn places_of(url: &ArchiveUrl, to_write: bool) -> AllowedPaths {
    let mut places = AllowedPaths::connecting();
    if let Some(keys) = ArchiveUrl::keys_file() {
        places.read(&keys);
    }
    match url.directory() {
        Some(directory) if to_write => places.tree(directory),
        Some(directory) => places.read(directory),
        None => {}
    }
    places
}

/// Sends all that the log has now.
fn push(
    archive: &Archive,
    log: &Path,
    options: UploadOptions,
    json: bool,
) -> Result<(), CommandError> {
    let begun = Instant::now();
    let mut uploader = Uploader::new(archive, log, options)?;
    let last = with_bar("archiving", |progress| {
        loop {
            let tick = uploader.tick()?;
            if let Some(error) = uploader.take_copy_error() {
                return Err(error.into());
            }
            warn_anew(&mut uploader);
            if let Some(base) = tick.base {
                progress(base.passed, base.total);
            } else if tick.caught_up && tick.restorable {
                return Ok::<_, CommandError>(tick.last);
            } else if tick.log_bytes == 0 {
                // A batch is being written.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    })?;
    let traffic = archive.traffic();
    if json {
        let mut line = point_json(last);
        line["epoch"] = uploader.epoch().into();
        line["sent_bytes"] = traffic.sent_bytes.into();
        line["requests"] = (traffic.reads + traffic.writes + traffic.lists).into();
        line["seconds"] = begun.elapsed().as_secs_f64().into();
        print(format_args!("{line}\n"));
    } else {
        print(format_args!(
            "{}: archived up to {}; sent {} in {:.1} s\n",
            archive.shown(),
            point_text(last),
            human_size(traffic.sent_bytes),
            begun.elapsed().as_secs_f64(),
        ));
    }
    Ok(())
}

/// How long to wait before the store is tried again, at most.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// The same while requests wait for the store.
const RETRY_FOR_WAITERS: Duration = Duration::from_secs(1);

/// A push that goes on with what the log gets.
struct FollowingPush<'a> {
    archive: &'a Archive,
    log: &'a Path,
    options: UploadOptions,
    interval: Duration,
    json: bool,
    /// Ends once this has.
    input: Option<Arc<InputWatch>>,
    /// What was acknowledged, if that is wanted.
    acknowledged: Option<u64>,
    /// It was told that requests wait in vain.
    lost: bool,
    /// Requests wait for what is sent.
    sync: bool,
    /// What is told in `progress`, for the process whose log it is.
    told: PushProgress,
    progress: Option<File>,
}

impl FollowingPush<'_> {
    /// Sends what the log gets, until its input ends, or something fails that will not mend itself.
    /// With an input, nobody starts it again, so it also goes on after errors that somebody has to
    /// put right.
    fn run(mut self) -> Result<(), CommandError> {
        let done = self.follow();
        if let Err(error) = &done {
            self.tell_error(error);
        }
        done
    }

    fn follow(&mut self) -> Result<(), CommandError> {
        let mut retry = Retry::new(self.interval);
        let mut uploader: Option<Uploader<'_>> = None;
        let mut ends = false;
        let mut soon = SOON;
        // Another push of this machine may be sending the last of what it has.
        let mut fenced = 0;
        // Errors that do not mend themselves, since the archive could be restored.
        let mut failed = 0;
        loop {
            let (begun, begun_us) = (Instant::now(), unix_us(SystemTime::now()));
            let mut copy_error = None;
            let ticked = match &mut uploader {
                Some(uploader) => {
                    uploader.expect(self.progress.as_ref().map_or(0, awaited));
                    let ticked = uploader.tick_and_tell(&mut |lsn| self.acknowledge(lsn));
                    warn_anew(uploader);
                    match uploader.take_copy_error() {
                        // Without images the log alone restores nothing.
                        Some(error) if matches!(&ticked, Ok(tick) if !tick.restorable) => {
                            Err(error)
                        }
                        error => {
                            copy_error = error;
                            ticked.map(Some)
                        }
                    }
                }
                None => Uploader::new(self.archive, self.log, self.options.clone()).map(|new| {
                    uploader = Some(new);
                    None
                }),
            };
            let rest = match ticked {
                Ok(tick) => {
                    retry.worked();
                    let Some(tick) = tick else { continue };
                    if tick.restorable {
                        failed = 0;
                        if std::mem::take(&mut self.lost) {
                            self.write_acknowledged(self.acknowledged.unwrap_or(0));
                        }
                    }
                    self.tell(&tick, begun_us);
                    if let Some(error) = copy_error {
                        tracing::warn!("{error}; the images are copied later, the log goes on");
                        self.tell_error(&error);
                    }
                    if ends && tick.caught_up {
                        return Ok(());
                    }
                    let idle = (tick.caught_up || tick.log_bytes == 0) && tick.base.is_none();
                    if idle {
                        let rest = if self.sync && !(tick.caught_up && tick.restorable) {
                            // Nothing else wakes this push for the request that waits for what
                            // can't be read yet, or for images that do not count yet.
                            soon = (2 * soon).min(RETRY_FOR_WAITERS);
                            soon
                        } else {
                            soon = SOON;
                            self.interval.saturating_sub(begun.elapsed())
                        };
                        ends = self.wait(rest, self.sync);
                        continue;
                    }
                    soon = SOON;
                    Duration::ZERO
                }
                Err(error) => {
                    fenced += u32::from(error.kind() == ErrorKind::Fenced);
                    let mends = match error.kind() {
                        ErrorKind::Unavailable => true,
                        ErrorKind::Fenced => uploader.is_none() && fenced < MOST_FENCED,
                        ErrorKind::InvalidInput => false,
                        _ => self.input.is_some(),
                    };
                    if ends || !mends {
                        return Err(error.into());
                    }
                    tracing::warn!("{error}; the archive is behind, and is tried again");
                    self.tell_error(&error);
                    if !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Fenced) {
                        failed += 1;
                        if failed == MOST_FAILED {
                            self.lost = true;
                            self.write_acknowledged(LOST);
                        }
                    }
                    let rest = retry.next();
                    if self.sync {
                        rest.min(RETRY_FOR_WAITERS)
                    } else {
                        rest
                    }
                }
            };
            ends = self.wait(rest, false);
            if ends && uploader.is_none() {
                // It claims no archive any more.
                let log = self.log.display();
                return Err(CommandError::Failed(format!("{log}: {NOT_ALL_SENT}")));
            }
        }
    }

    /// Tells the log's process at once up to which LSN the archive has everything.
    fn acknowledge(&mut self, lsn: u64) {
        let Some(acknowledged) = self.acknowledged.as_mut().filter(|before| **before < lsn) else {
            return;
        };
        *acknowledged = lsn;
        self.write_acknowledged(lsn);
    }

    fn write_acknowledged(&self, lsn: u64) {
        if self.acknowledged.is_some() {
            // Nobody waits any more if this fails.
            let _ = rustix::io::write(std::io::stdout(), &lsn.to_ne_bytes());
        }
    }

    /// Waits, at most until the input ends; returns whether it has ended. `wakes`: also until
    /// something comes from it.
    fn wait(&self, time: Duration, wakes: bool) -> bool {
        match &self.input {
            Some(input) => input.wait(time, wakes),
            None => {
                std::thread::sleep(time);
                false
            }
        }
    }

    /// Tells how far the archive is. `begun_us`: when the tick began.
    fn tell(&mut self, tick: &Tick, begun_us: u64) {
        if self.json && (tick.records > 0 || tick.base.is_some()) {
            print(format_args!("{}\n", tick_json(tick)));
        }
        let traffic = self.archive.traffic();
        self.told = PushProgress {
            lsn: tick.last.lsn,
            cid: tick.last.cid,
            unix_us: tick.last.unix_us,
            caught_up_us: if tick.caught_up {
                begun_us
            } else {
                self.told.caught_up_us
            },
            restorable: tick.restorable,
            sent_bytes: traffic.sent_bytes,
            requests: traffic.reads + traffic.writes + traffic.lists,
            error: None,
        };
        self.write_progress();
    }

    fn tell_error(&mut self, error: &impl ToString) {
        self.told.error = Some(error.to_string());
        self.write_progress();
    }

    fn write_progress(&self) {
        let written = self.progress.as_ref().map(|file| self.told.write(file));
        if let Some(Err(error)) = written {
            tracing::warn!("the progress can't be told: {error}");
        }
    }
}

/// How long to wait before the log is read again, if requests wait for what it has.
const SOON: Duration = Duration::from_millis(20);
/// How often what does not mend itself may fail before nobody waits for it any more.
const MOST_FAILED: u32 = 5;
/// How often a push that is fenced off before it has begun is tried.
const MOST_FENCED: u32 = 5;
const NOT_ALL_SENT: &str = "the archive lacks what was written last; push it again";

/// What has come from standard input.
#[derive(Default)]
struct Input {
    ended: bool,
    /// Something has come since the last wait that wakes.
    woken: bool,
}

/// Watches standard input.
#[derive(Default)]
struct InputWatch {
    input: Mutex<Input>,
    changed: Condvar,
}

impl InputWatch {
    /// Starts a thread that reads standard input. It ends the process [`LAST_PUSH`] after the end
    /// of the input, whatever a store that does not answer keeps from ending.
    fn start() -> Arc<Self> {
        let watch = Arc::new(Self::default());
        let own = Arc::clone(&watch);
        std::thread::spawn(move || {
            while next_bytes_come() {
                own.lock().woken = true;
                own.changed.notify_all();
            }
            own.lock().ended = true;
            own.changed.notify_all();
            std::thread::sleep(LAST_PUSH);
            eprintln!("walvisor: {NOT_ALL_SENT}");
            std::process::exit(1);
        });
        watch
    }

    fn lock(&self) -> MutexGuard<'_, Input> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the input ends, at most for this time; returns whether it has ended. Once it
    /// has, this waits 20 ms at most. `wakes`: also until something comes.
    fn wait(&self, time: Duration, wakes: bool) -> bool {
        let input = self.lock();
        if input.ended {
            drop(input);
            std::thread::sleep(time.min(Duration::from_millis(20)));
            return true;
        }
        let waits = |input: &mut Input| !(input.ended || wakes && input.woken);
        let waited = self.changed.wait_timeout_while(input, time, waits);
        let (mut input, _) = waited.unwrap_or_else(PoisonError::into_inner);
        input.woken &= !wakes;
        input.ended
    }
}

/// Waits for bytes from standard input; `false` at its end.
fn next_bytes_come() -> bool {
    let mut bytes = [0; 512];
    loop {
        match rustix::io::read(std::io::stdin(), &mut bytes) {
            Ok(count) => return count > 0,
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Says why the images are copied again.
fn warn_anew(uploader: &mut Uploader<'_>) {
    if let Some(wait) = uploader.take_wait() {
        tracing::warn!("{wait}");
    }
    if let Some(why) = uploader.take_reason() {
        let epoch = uploader.epoch();
        tracing::warn!(
            "{why}: the images are copied again, in epoch {epoch}; until that has ended, the newest \
             points can't be restored"
        );
    }
}

/// How long to wait after an error that may mend itself: twice as long each time.
struct Retry {
    interval: Duration,
    wait: Duration,
}

impl Retry {
    fn new(interval: Duration) -> Self {
        Self {
            interval,
            wait: interval,
        }
    }

    fn worked(&mut self) {
        self.wait = self.interval;
    }

    /// How long to wait before the next attempt.
    fn next(&mut self) -> Duration {
        let wait = self.wait;
        self.wait = (2 * wait).min(LONGEST_WAIT.max(self.interval));
        wait
    }
}

/// Keeps a replica, until something fails that will not mend itself.
fn follow_archive(
    archive: &Archive,
    dir: &Path,
    interval: Duration,
    json: bool,
) -> Result<(), CommandError> {
    let mut retry = Retry::new(interval);
    let mut replica: Option<Replica<'_>> = None;
    loop {
        let begun = Instant::now();
        let ticked = match &mut replica {
            Some(replica) => replica.tick().map(Some),
            None => {
                with_bar("copying", |progress| Replica::open(archive, dir, progress)).map(|new| {
                    report_disks(&new.disks(), json);
                    replica = Some(new);
                    None
                })
            }
        };
        match ticked {
            Ok(tick) => {
                retry.worked();
                let Some(state) = tick else { continue };
                if state.records > 0 {
                    report_followed(&state, json);
                }
                if state.caught_up || state.records == 0 {
                    std::thread::sleep(interval.saturating_sub(begun.elapsed()));
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::InUse) => {
                tracing::warn!("{error}; the replica is behind, and is tried again");
                std::thread::sleep(retry.next());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Where the disks of a replica are.
fn report_disks(disks: &[RestoredDisk], json: bool) {
    for disk in disks {
        let path = disk.path.display();
        if json {
            let line = json!({ "disk": path.to_string(), "bytes": disk.bytes });
            print(format_args!("{line}\n"));
        } else {
            print(format_args!(
                "{path}: follows, {}\n",
                human_size(disk.bytes)
            ));
        }
    }
}

fn report_followed(state: &ReplicaReport, json: bool) {
    if json {
        let mut line = point_json(state.last);
        line["records"] = state.records.into();
        line["caught_up"] = state.caught_up.into();
        line["made_us"] = state.made_us.into();
        print(format_args!("{line}\n"));
    }
}

/// Makes a replica a log of its own.
fn promote(archive: &Archive, dir: &Path, json: bool) -> Result<(), CommandError> {
    let replica = with_bar("copying", |progress| Replica::open(archive, dir, progress))?;
    let (disks, log_dir) = (replica.disks(), replica.log_dir().to_owned());
    let promotion = replica.promote()?;
    if promotion.left_behind {
        tracing::warn!(
            "this replica lacks the newest records: the old host restarted the archive, and its new \
             images are incomplete"
        );
    }
    report_restored(
        &RestoreReport {
            commit: promotion.commit,
            log_dir,
            disks,
            log_bytes: 0,
            chunks: 0,
        },
        json,
    );
    Ok(())
}

fn status(archive: &Archive, json: bool) -> Result<(), CommandError> {
    let found = survey(archive)?;
    if json {
        let spans = found.spans.iter().map(|span| {
            let bases = span.bases.iter().map(|base| {
                let mut line = point_json(base.exact);
                line["made_us"] = base.made_us.into();
                line["images"] = base
                    .images
                    .iter()
                    .map(|(name, bytes)| json!({ "name": name, "bytes": bytes }))
                    .collect();
                line
            });
            json!({
                "epoch": span.epoch,
                "last": point_json(span.last),
                "age_us": span.age_us,
                "bases": bases.collect::<Vec<_>>(),
            })
        });
        let line = json!({
            "epoch": found.epoch,
            "owner": found.owner,
            "log_bytes": found.part_bytes,
            "spans": spans.collect::<Vec<_>>(),
        });
        print(format_args!("{line}\n"));
        return Ok(());
    }
    print(format_args!(
        "{}: epoch {}, last claimed by {}; {} of log\n",
        archive.shown(),
        found.epoch,
        found.owner,
        human_size(found.part_bytes)
    ));
    for span in &found.spans {
        let newest = point_text(span.last);
        let sent = span.age_us as f64 / 1e6;
        let Some(oldest) = span.bases.first() else {
            print(format_args!(
                "  up to {newest}, sent {sent:.1} s ago: no copy of the images is complete yet\n"
            ));
            continue;
        };
        print(format_args!(
            "  any point from {} to {newest}, sent {sent:.1} s ago\n",
            point_text(oldest.exact)
        ));
        for base in &span.bases {
            let images = base.images.iter();
            let images = images.map(|(name, bytes)| format!("{name} ({})", human_size(*bytes)));
            print(format_args!(
                "    images as of {}: {}\n",
                point_text(base.exact),
                images.collect::<Vec<_>>().join(", ")
            ));
        }
    }
    Ok(())
}

/// Restores disks that are in use meanwhile.
fn restore_serving(
    archive: &Archive,
    dir: &Path,
    at: Point,
    json: bool,
) -> Result<(), CommandError> {
    let done = with_bar("fetching", |progress| {
        serve(
            archive,
            dir,
            at,
            |done| report_restored(done, json),
            progress,
        )
    })?;
    if json {
        print(format_args!(
            "{}\n",
            json!({ "fetched_chunks": done.chunks })
        ));
    } else {
        print(format_args!("the images are complete\n"));
    }
    Ok(())
}

fn report_restored(done: &RestoreReport, json: bool) {
    if json {
        let mut line = restored_json(done);
        line["log"] = json!(done.log_dir);
        for (line, disk) in line["disks"]
            .as_array_mut()
            .into_iter()
            .flatten()
            .zip(&done.disks)
        {
            line["path"] = json!(disk.path);
        }
        return print(format_args!("{line}\n"));
    }
    print(format_args!(
        "the disks as of {}, with {} of log\n",
        point_text(done.commit),
        human_size(done.log_bytes)
    ));
    for disk in &done.disks {
        let path = disk.path.display();
        let log = if walvisor_storage::default_log_dir(&disk.path) == done.log_dir {
            String::new()
        } else {
            format!(",log={}", done.log_dir.display())
        };
        print(format_args!(
            "  {}: --disk path={path}{log}\n",
            human_size(disk.bytes)
        ));
    }
}

fn report_expired(done: &ExpireReport, dry_run: bool, json: bool) {
    if json {
        let line = json!({
            "oldest": done.oldest.map(point_json),
            "images": done.bases,
            "parts": done.parts,
            "chunks": done.chunks,
            "bytes": done.bytes,
            "removed": !dry_run,
        });
        return print(format_args!("{line}\n"));
    }
    let verb = if dry_run { "would remove" } else { "removed" };
    print(format_args!(
        "{verb} copies of the images: {}, parts of the log: {}, chunks: {}; {} in all\n",
        done.bases,
        done.parts,
        done.chunks,
        human_size(done.bytes)
    ));
    match done.oldest {
        Some(oldest) => print(format_args!("the oldest point is {}\n", point_text(oldest))),
        None => print(format_args!("no copy of the images is complete yet\n")),
    }
}

fn report_verified(done: &RestoreReport, json: bool) {
    if json {
        return print(format_args!("{}\n", restored_json(done)));
    }
    print(format_args!(
        "verified up to {}: {} disks, {} chunks of images, {} of log\n",
        point_text(done.commit),
        done.disks.len(),
        done.chunks,
        human_size(done.log_bytes)
    ));
}

fn restored_json(done: &RestoreReport) -> Value {
    let mut line = point_json(done.commit);
    line["log_bytes"] = done.log_bytes.into();
    line["chunks"] = done.chunks.into();
    line["disks"] = done
        .disks
        .iter()
        .map(|disk| json!({ "name": disk.path.file_name().map(|name| name.to_string_lossy()), "bytes": disk.bytes }))
        .collect();
    line
}

fn tick_json(tick: &Tick) -> Value {
    let mut line = point_json(tick.last);
    line["records"] = tick.records.into();
    line["log_bytes"] = tick.log_bytes.into();
    line["caught_up"] = tick.caught_up.into();
    line["restorable"] = tick.restorable.into();
    if let Some(base) = tick.base {
        line["image_bytes_passed"] = base.passed.into();
        line["image_bytes"] = base.total.into();
    }
    line
}

fn point_json(commit: Commit) -> Value {
    json!({ "lsn": commit.lsn, "cid": commit.cid, "unix_us": commit.unix_us })
}

fn point_text(commit: Commit) -> String {
    match commit.unix_us {
        0 => commit.to_string(),
        unix_us => format!("{commit} ({})", time_text(unix_us)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_in_words() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("24h"), Ok(Duration::from_secs(86_400)));
        assert!(time("0s").is_err() && time("10G").is_err() && time("soon").is_err());
    }
}
