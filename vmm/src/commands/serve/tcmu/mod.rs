//! `walvisor serve tcmu`: serves disks to this machine's own kernel, through its SCSI target.

mod served;
mod wanted;

use std::path::Path;
use std::thread;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::listen::Stop;

use self::served::{Changing, Served};
use self::wanted::{wanted, wwn};
use super::daemon::{DaemonArguments, Ending, announce, conclude};
use super::members::{Membership, SharedLogs};
use crate::commands::CommandError;
use crate::commands::socket_names::SocketNames;
use crate::disk::OpenDisk;
use crate::disk_spec::DiskCommand;
use crate::disks;
use crate::landlock::Places;
use crate::lio::{Backstore, Events, Standing, Target, TargetExport, Uio, Wanted};
use crate::metrics::DiskMetrics;
use crate::seccomp::Duty;

/// The arguments of `walvisor serve tcmu`.
#[derive(Args, Debug)]
pub struct TcmuArguments {
    /// What every daemon takes.
    #[command(flatten)]
    pub daemon: DaemonArguments,
    /// List walvisor's disks in the kernel's target, served or not, and exit
    #[arg(long, conflicts_with = "disks")]
    pub list: bool,
    /// With --list: print JSON
    #[arg(long, requires = "list")]
    pub json: bool,
    /// Remove disks that a killed daemon has left in the kernel's target, with their LUNs, and exit
    #[arg(long, value_name = "NAME", num_args = 0.., conflicts_with_all = ["disks", "list"])]
    pub remove: Option<Vec<String>>,
    /// With --remove: remove all such disks
    #[arg(long, requires = "remove")]
    pub all: bool,
}

/// Carries out `walvisor serve tcmu`.
pub(super) fn run(arguments: &TcmuArguments, started: Instant) -> Result<(), CommandError> {
    if arguments.list {
        return list(arguments.json);
    }
    if let Some(names) = &arguments.remove {
        return remove(names, arguments.all);
    }
    let arguments = &arguments.daemon;
    let specs = &arguments.disks;
    let wanted = wanted(specs).map_err(CommandError::Usage)?;
    disks::check(specs).map_err(CommandError::Usage)?;
    let metrics = arguments.process.metrics()?;
    // The names are declared first, so that they are removed after everything that listens at them is dropped.
    let mut names = SocketNames::default();
    let ending = Ending::prepare(arguments, &mut names, DiskCommand::Tcmu, started)?;
    let mut target = Target::open().map_err(CommandError::failed)?;
    let comes = !arguments.disk_dirs.is_empty();
    if comes {
        target.entrust().map_err(CommandError::failed)?;
    }
    // The back stores are raised before the disks are opened, which may take long after a crash: initiators of
    // an earlier process wait, and get no errors.
    let raised = specs.iter().zip(&wanted).map(|(spec, wanted)| {
        let fabric = spec.fabric;
        Standing::raise(&target, wanted, fabric, &wwn(spec, wanted))
    });
    let standing = raised
        .collect::<Result<Vec<_>, _>>()
        .map_err(CommandError::failed)?;
    // The listener starts after the back stores are raised, so that it does not hear of this process's own
    // changes.
    let events = Events::listen()
        .inspect_err(|error| tracing::warn!("changes in configfs are not noticed: {error}"));
    let scratch = arguments.restrict(&mut names, |places| {
        standing
            .iter()
            .for_each(|disk| reach(places, &target, disk));
        if comes {
            reach_all(places, &target);
        }
    })?;
    let (open, logs) = disks::open(specs, 1, scratch).map_err(CommandError::failed)?;
    let logs = SharedLogs::new(logs);
    let changing = Changing {
        target,
        served: Served::default(),
    };
    let served = changing.served.clone();
    let ended = arguments.filter(Duty::Tcmu).and_then(|()| {
        let events = events.ok();
        serve(
            arguments, &wanted, open, standing, events, changing, &logs, ending,
        )
    });
    let (ended, stays) = match (ended, served.dismantle()) {
        (ended, Ok(stays)) => (ended, stays),
        (ended, Err(error)) => (ended.and(Err(CommandError::failed(error))), Vec::new()),
    };
    conclude(ended, metrics, &logs)?;
    // Now that the logs are closed, no completed write is in memory only, so the next process can take over
    // these back stores.
    for store in stays {
        store.set_durable(true).map_err(CommandError::failed)?;
    }
    Ok(())
}

/// The directories of configfs that a standing disk needs, while it is served and when it is taken down.
fn reach(places: &mut Places, target: &Target, disk: &Standing) {
    let directory = disk.store().directory();
    let hba = directory.parent().unwrap_or(directory);
    places.configure(hba);
    places.dismantle(hba.parent().unwrap_or(hba));
    for export in disk.exports() {
        places.configure(&export.fabric().join(export.wwn()));
        places.dismantle(export.fabric());
    }
    // The process also looks up other exports of the disk, and the kernel's name for the disk.
    places.read(&target.root());
    places.read(Path::new("/sys/bus/scsi"));
    places.read(Path::new("/sys/devices"));
}

/// What disks need that are added later: the number of a back store, and so its directory, is known only when it is made.
fn reach_all(places: &mut Places, target: &Target) {
    let grounds = target.grounds();
    grounds.iter().for_each(|ground| places.build(ground));
    places.read(target.devices());
}

/// Serves open disks until a signal comes. Returns the metrics of the disks that there are at the end.
#[expect(clippy::too_many_arguments, reason = "each is of one use")]
fn serve(
    arguments: &DaemonArguments,
    wanted: &[Wanted],
    disks: Vec<OpenDisk>,
    standing: Vec<Standing>,
    events: Option<Events>,
    changing: Changing,
    logs: &SharedLogs,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut lines, mut controlled) = (String::new(), Vec::new());
    let served = changing.served.clone();
    let members = arguments.disks.iter().zip(wanted).zip(&disks).zip(standing);
    for (((spec, wanted), disk), standing) in members {
        let (in_use, place) = served
            .serve(spec, wanted, disk, standing)
            .map_err(CommandError::Failed)?;
        let bytes = disk.backend.sectors() * SECTOR_SIZE;
        let line = format!("serving {}: {bytes} bytes at {place}\n", wanted.name);
        lines.push_str(&line);
        controlled.push(in_use);
    }
    drop(disks);
    announce(&lines);
    let members = Membership::new(changing, &arguments.disks, &arguments.disk_dirs, logs, 1);
    let stop = Stop::new().map_err(CommandError::failed)?;
    thread::scope(|scope| {
        if let Some(events) = &events {
            scope.spawn(|| served.listen(events, &stop));
        }
        let ended = ending.wait(controlled, Some(Box::new(members)));
        stop.tell();
        ended
    })
}

/// Lists the back stores in the target.
fn list(as_json: bool) -> Result<(), CommandError> {
    let target = Target::open().map_err(CommandError::failed)?;
    let stores = Backstore::ours(&target);
    let rows = stores.iter().map(|store| {
        let exports = TargetExport::of(store);
        let places: Vec<_> = exports.iter().map(TargetExport::place).collect();
        let disks: Vec<_> = exports.iter().filter_map(TargetExport::disk_now).collect();
        (store, places, disks, Uio::server(store))
    });
    if as_json {
        let rows: Vec<_> = rows
            .map(|(store, places, disks, server)| {
                json!({
                    "name": store.name,
                    "image": store.image(),
                    "size_bytes": store.size(),
                    "path": store.directory().display().to_string(),
                    "exports": places,
                    "disks": disks,
                    "pid": server,
                })
            })
            .collect();
        announce(&format!("{}\n", serde_json::Value::from(rows)));
        return Ok(());
    }
    for (store, places, disks, server) in rows {
        let size = store.size().unwrap_or(0);
        let image = store.image().unwrap_or_default();
        let seen = [disks, places].concat();
        let seen = if seen.is_empty() {
            "exported by none".to_owned()
        } else {
            seen.join(", ")
        };
        let served = match server {
            Some(process) => format!("served by process {process}"),
            None => "served by none".to_owned(),
        };
        announce(&format!(
            "{}: {size} bytes of {image}; {seen}; {served}\n",
            store.name
        ));
    }
    Ok(())
}

/// Removes back stores that no process serves.
fn remove(names: &[String], all: bool) -> Result<(), CommandError> {
    if names.is_empty() != all {
        return Err(CommandError::Usage(
            "--remove takes the names of disks ('--list' shows them), or --all".to_owned(),
        ));
    }
    let target = Target::open().map_err(CommandError::failed)?;
    let ours = Backstore::ours(&target);
    let mut chosen = Vec::new();
    for name in names {
        let found = ours.iter().find(|store| store.name == *name);
        chosen.push(found.ok_or_else(|| {
            CommandError::Failed(format!(
                "the kernel's target has no disk '{name}' of walvisor: '--list' shows its disks"
            ))
        })?);
    }
    if all {
        chosen.extend(&ours);
    }
    let mut outcome = Ok(());
    for store in chosen {
        match Standing::clear(store) {
            Ok(()) => announce(&format!("removed {}\n", store.name)),
            Err(error) if outcome.is_ok() => outcome = Err(CommandError::failed(error)),
            Err(error) => tracing::error!("{error}"),
        }
    }
    outcome
}
