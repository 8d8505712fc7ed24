//! `walvisor-bench peers`: the disk compared with those of other programs. All use the same client and file system, and
//! take turns.
//!
//! ```text
//!   virtio driver in this process ─▶ serve vhost-user  │ qemu-storage-daemon         vhost_user.rs
//!   fio's nbd engine              ─▶ serve nbd         │ qemu-nbd                    nbd.rs
//!   fio in one emulated guest     ─▶ serve vhost-user  │ QEMU's own virtio-blk       emulated.rs
//!   fio in user-mode Linux        ─▶ serve tcmu        │ tcmu-runner                 target.rs
//! ```
//! The peers open their images like a careful host (`cache.direct`, io_uring, FLUSH = fdatasync), and once like a careless
//! one (`cache=writeback`). If a peer is not installed, a note names its package, and the others are measured.

mod emulated;
mod nbd;
mod place;
mod target;
mod turns;
mod vhost_user;

use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;

use crate::output::Output;
use crate::report::plot::{Plot, PlotKind};
use crate::report::{Cell, Preference, Section, Spread};
use place::ImageDirectory;
use turns::{PeerDoor, PeerFailure, PeerJob, PeerRow, Schedule, expected};

/// Arguments of `walvisor-bench peers`.
#[derive(Debug, Args)]
pub struct PeersArguments {
    /// Only these doors, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "DOOR,DOOR..")]
    only: Vec<PeerDoor>,
    /// Only the jobs with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    job: String,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench peers`.
///
/// # Errors
/// If the measurement of an installed peer fails.
pub fn run(arguments: &PeersArguments) -> Result<(), CommandError> {
    let Output { quick, dir, .. } = &arguments.output;
    let rounds = arguments.output.rounds(5, 1);
    let pace = Schedule {
        rounds,
        turn: Duration::from_secs(if *quick { 1 } else { 2 }),
        quick: *quick,
    };
    let doors: Vec<PeerDoor> = PeerDoor::value_variants()
        .iter()
        .filter(|door| arguments.only.is_empty() || arguments.only.contains(door))
        .copied()
        .collect();
    let wanted = |jobs: &'static [PeerJob]| -> Vec<&'static PeerJob> {
        let jobs = jobs.iter();
        jobs.filter(|job| job.name.contains(&arguments.job))
            .collect()
    };
    let time = doors.iter().map(|door| match door {
        PeerDoor::VhostUser => expected(&wanted(&vhost_user::JOBS), 2, pace, vhost_user::BEFORE),
        PeerDoor::Nbd => expected(&wanted(&nbd::JOBS), nbd::SIDES, pace, nbd::BEFORE),
        PeerDoor::Qemu => emulated::expected(pace),
        PeerDoor::Tcmu => target::expected(pace),
    });
    let session = arguments.output.start(time.sum())?;
    let place = ImageDirectory::new(dir)?;
    let (mut rows, mut missing, mut failed) = (Vec::new(), Vec::new(), None);
    for door in doors {
        let measured = match door {
            PeerDoor::VhostUser => {
                vhost_user::measure(&place, &wanted(&vhost_user::JOBS), pace, &session)
            }
            PeerDoor::Nbd => nbd::measure(&place, &wanted(&nbd::JOBS), pace, &session),
            PeerDoor::Qemu => emulated::measure(&place, pace, &session),
            PeerDoor::Tcmu => target::measure(pace, &session),
        };
        match measured {
            Ok(measured) => rows.extend(measured),
            Err(PeerFailure::Missing(what)) => missing.push(what),
            // Ctrl-C also ends the other programs on the terminal.
            Err(PeerFailure::Failed(_)) if session.interrupted() => break,
            Err(PeerFailure::Failed(error)) => {
                missing.push(format!("Not measured: {error}"));
                failed = failed.or(Some(error));
            }
        }
    }
    let title = "The disk beside its peers";
    arguments
        .output
        .write(title, session, vec![section(&rows, &missing, pace)])?;
    failed.map_or(Ok(()), Err)
}

fn section(rows: &[PeerRow], missing: &[String], pace: Schedule) -> Section {
    let rounds = format!(
        "4 KiB, random; requests or commits a second: median of {} turns of {} s each (lowest to highest).",
        pace.rounds,
        pace.turn.as_secs()
    );
    let mut notes = vec![
        rounds.as_str(),
        "Over vhost-user and NBD each is halted while the other is measured, and begins a job with nothing left to be copied.",
        "A commit is a write and, once that has ended, a FLUSH. Peers open their image with cache.direct and io_uring, and FLUSH is \
         an fdatasync; cache=writeback goes through the host's page cache, FLUSH likewise.",
    ];
    if rows
        .iter()
        .any(|row| row.peers.contains_key(nbd::FROM_MEMORY))
    {
        notes.push(
            "Over NBD a write is answered once a kill of the daemon cannot lose it, as qemu-nbd's are in the host's cache; \
             with answer=memory it may be lost up to the next FLUSH.",
        );
    }
    if rows.iter().any(|row| row.emulated) {
        notes.push(
            "The guest of door qemu runs in full emulation: it is the guest's processor that is slow, and its figures are in brackets.",
        );
    }
    notes.extend(missing.iter().map(String::as_str));
    let mut section = Section::new(
        "peers",
        "The disk beside its peers",
        &notes,
        &[
            ("door", "door"),
            ("job", "job"),
            ("walvisor_per_s", "walvisor"),
            ("peer", "peer"),
            ("peer_per_s", "peer's"),
            ("ratio", "ratio"),
            ("goal", "goal"),
        ],
    );
    let mut bars = Vec::new();
    for row in rows {
        let door = row.door.to_possible_value();
        let door = door.as_ref().map_or("", |door| door.get_name());
        let grey = |cell: Cell| if row.emulated { cell.grey() } else { cell };
        let ours = Spread::of(&row.ours);
        for (peer, rates) in &row.peers {
            let ratio = ours.zip(Spread::of(rates));
            let ratio = ratio.map(|(ours, theirs)| ours.median / theirs.median);
            section.table.rows.push(vec![
                Cell::text(door),
                Cell::text(&row.job),
                grey(Cell::of(&row.ours, 0)),
                Cell::text(peer),
                grey(Cell::of(rates, 0)),
                ratio.map_or(Cell::None, |ratio| {
                    grey(Cell::ratio(ratio, Preference::More))
                }),
                // A goal is relative to a peer, so another mode of `walvisor` itself has none.
                row.goal
                    .filter(|_| peer != nbd::FROM_MEMORY)
                    .map_or(Cell::None, |goal| Cell::Number(goal, 1)),
            ]);
            let label = format!("{door}: {} ({peer})", row.job);
            bars.push((label, vec![ratio.and_then(|ratio| Spread::of(&[ratio]))]));
        }
    }
    section.plots = vec![Plot {
        name: "peers".to_owned(),
        title: "walvisor beside its peers".to_owned(),
        caption: "A green bar: walvisor does more than the peer. An orange one: it does less."
            .to_owned(),
        kind: PlotKind::Bars {
            unit: "times what the peer does; the line is at 1, as much".to_owned(),
            groups: vec!["ratio".to_owned()],
            even: Some(1.0),
            rows: bars,
        },
    }];
    section
}
