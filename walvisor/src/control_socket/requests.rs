//! Carries out requests.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rustix::net::sockopt;
use serde_json::{Value, json};
use walvisor_devices::backend::{SECTOR_SIZE, flush};
use walvisor_devices::throttle;
use walvisor_storage::{Disk, LogHistory, ReadHold, Retention};
use walvisor_vmm::disk::DiskInUse;

use super::command::{
    CacheChoice, ControlCommand, ControlError, DiskChoice, LimitChange, LookRequest, StatsFormat,
};
use super::controlled::{
    AddedDisk, ControlledProcess, DiskHotplug, DiskLease, Power, RemovalError, SavedPool,
};
use super::stats;
use crate::disk::{cache_in_force, grow, log_name, logged};
use crate::disks::RemovedDisk;
use crate::point::{
    given_up_json, mark_json, refuse_checkpoint, rewound_json, set_retention, snapshot_json,
};

impl ControlledProcess {
    fn limit(&self, disk: &DiskInUse, limits: throttle::Limits) {
        disk.throttle.set(limits);
        disk.backend.set_weight(disk.throttle.weight());
        self.apply_end(disk);
    }

    /// Carries out a request.
    pub(super) fn execute(&self, command: &ControlCommand) -> Result<Value, ControlError> {
        match command {
            ControlCommand::Stats {
                format: StatsFormat::Json,
            } => Ok(stats::json(self)),
            ControlCommand::Stats {
                format: StatsFormat::Prometheus,
            } => Ok(json!({ "text": stats::prometheus(self) })),
            ControlCommand::Pause { disk: None } => self.pause(),
            ControlCommand::Pause { disk: Some(name) } => self.pause_disk(name),
            ControlCommand::Resume { disk: None } => {
                self.resume();
                Ok(json!({ "state": "running" }))
            }
            ControlCommand::Resume { disk: Some(name) } => self.resume_disk(name),
            ControlCommand::Resize { disk, size_bytes } => self.resize(disk.as_ref(), *size_bytes),
            ControlCommand::SetCache { disk, cache } => self.set_cache(disk.as_deref(), *cache),
            ControlCommand::SetLimit(change) => self.set_limit(change),
            ControlCommand::Checkpoint {
                disk,
                give_up_history,
            } => self.checkpoint(disk.as_ref(), *give_up_history),
            ControlCommand::Export { .. } => Err(ControlError::new(
                "export: send the descriptor of an empty file with the request (SCM_RIGHTS), as \
                 'walvisor ctl' does",
            )),
            ControlCommand::AddDisk { spec } => {
                let hotplug = self.hotplug()?;
                self.refuse_while_paused()?;
                let added = hotplug.add(spec).map_err(ControlError::new)?;
                Ok(self.list_added(added))
            }
            ControlCommand::RemoveDisk { disk, keep_records } => {
                self.remove_disk(disk, *keep_records)
            }
            ControlCommand::Config { saved, .. } => self.config(saved),
            ControlCommand::Snapshot { disk, name, alone } => {
                let made = if *alone {
                    let disk = self.chosen(disk.as_ref())?;
                    in_log(&disk, |disk| disk.snapshot_alone(name.parse()?))
                } else {
                    let disk = self.disk_of_log(disk.as_ref())?;
                    in_log(&disk, |disk| disk.snapshot(name.parse()?))
                };
                Ok(snapshot_json(&made?))
            }
            ControlCommand::Snapshots { disk } => {
                in_log(&self.disk_of_log(disk.as_ref())?, |disk| {
                    let snapshots: Vec<_> = disk.snapshots().iter().map(snapshot_json).collect();
                    Ok(json!({ "retain": disk.retain().to_string(), "snapshots": snapshots }))
                })
            }
            ControlCommand::SnapshotDelete { disk, name } => {
                let disk = self.disk_of_log(disk.as_ref())?;
                in_log(&disk, |disk| disk.delete_snapshot(name.parse()?))?;
                Ok(json!({ "deleted": name }))
            }
            ControlCommand::Hold { .. } => {
                Err(ControlError::new("hold: only a connection can hold a log"))
            }
            ControlCommand::Restore { disk, at } => self.restore(disk.as_ref(), at),
            ControlCommand::Mark { disk, text } => {
                let text = text.parse().map_err(ControlError::new)?;
                let disk = self.disk_of_log(disk.as_ref())?;
                let made = in_log(&disk, |disk| disk.mark(&text))?;
                Ok(mark_json(&text, &made))
            }
            ControlCommand::SetRetain {
                disk,
                retain,
                give_up_history,
            } => self.set_retain(disk.as_ref(), retain, *give_up_history),
            ControlCommand::Look(_) => Err(ControlError::new(
                "look: send the descriptor of a socket that listens with the request (SCM_RIGHTS), \
                 as 'walvisor ctl' does",
            )),
            ControlCommand::Unlook { look } => {
                self.looks.end(&self.full_name(&look.to_string_lossy()))
            }
            ControlCommand::Looks {} => Ok(self.looks.list()),
            ControlCommand::Exports {} => Ok(self.exports.list()),
            ControlCommand::ExportCancel { disk } => self.exports.cancel(&self.full_name(disk)),
            ControlCommand::Shutdown { now: false } => {
                // While it is paused, neither a guest nor a disk can shut down.
                self.resume();
                Ok(json!({}))
            }
            ControlCommand::Shutdown { now: true } => Ok(json!({})),
        }
    }

    /// Carries out the part of a request that comes after its answer.
    pub(super) fn answered(&self, command: &ControlCommand) {
        let ControlCommand::Shutdown { now } = command else {
            return;
        };
        match &self.power {
            Power::Guest { control, .. } if *now => {
                control.end(walvisor_vmm::control::RunEnd::Quit)
            }
            Power::Guest { control, .. } => control.ask_for_power_down(),
            Power::Daemon { end, .. } => end(),
        }
    }

    /// The disk of this name, or the only one. The name of its export, which is its file's, is a
    /// name too, unless that is the name of another disk.
    fn disk(&self, name: Option<&str>) -> Result<DiskLease, ControlError> {
        let disks = self.disks();
        let names = || {
            let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
            names.join(", ")
        };
        let wanted = |disk: &&DiskLease| name.is_none_or(|name| disk.name == name);
        let mut found: Vec<_> = disks.iter().filter(wanted).collect();
        if found.is_empty() {
            let file =
                |disk: &&DiskLease| name.map(OsStr::new) == Path::new(&disk.name).file_name();
            found = disks.iter().filter(file).collect();
        }
        match (&found[..], name) {
            ([disk], _) => Ok(DiskLease::clone(disk)),
            ([], Some(name)) if disks.is_empty() => Err(ControlError::no_such_disk(format_args!(
                "no disk '{name}': there are no disks"
            ))),
            ([], Some(name)) => Err(ControlError::no_such_disk(format_args!(
                "no disk '{name}': there are {}",
                names()
            ))),
            ([], None) => Err(ControlError::no_such_disk("there are no disks")),
            (_, Some(name)) => Err(ControlError::no_such_disk(format_args!(
                "several disks are called '{name}': give each its own serial="
            ))),
            (_, None) => Err(ControlError::no_such_disk(format_args!(
                "say which disk: {}",
                names()
            ))),
        }
    }

    /// The disk of this choice, or the only one.
    fn chosen(&self, choice: Option<&DiskChoice>) -> Result<DiskLease, ControlError> {
        let (image, log) = match choice {
            None => return self.disk(None),
            Some(DiskChoice::Name(name)) => return self.disk(Some(name)),
            Some(DiskChoice::Image { image, log }) => (image, log),
        };
        let mut disks = self.disks().into_iter().filter(|disk| is_on(disk, log));
        let is_there = |disk: &DiskLease| {
            let logged = logged(&*disk.backend);
            logged.is_some_and(|disk| same_file(disk.path(), image))
        };
        disks.find(is_there).ok_or_else(|| {
            let (image, log) = (image.display(), log.display());
            ControlError::no_such_disk(format_args!(
                "{image}: process {}, which has the log {log} open, does not serve this disk of it",
                std::process::id()
            ))
        })
    }

    /// The disk of this choice, or any disk of its log; without a choice, any disk of the only log.
    fn disk_of_log(&self, choice: Option<&DiskChoice>) -> Result<DiskLease, ControlError> {
        let mut logged = self.disks();
        logged.retain(|disk| disk.backend.logged().is_some());
        if let Some(DiskChoice::Image { log, .. }) = choice {
            let other = logged.into_iter().find(|disk| is_on(disk, log));
            return self.chosen(choice).or_else(|error| other.ok_or(error));
        }
        let logs: BTreeSet<_> = logged.iter().map(|disk| log_name(&*disk.backend)).collect();
        match logged.into_iter().next() {
            Some(disk) if choice.is_none() && logs.len() == 1 => Ok(disk),
            _ => self.chosen(choice),
        }
    }

    /// The name that [`disk`](Self::disk) finds, or else the same text.
    fn full_name(&self, name: &str) -> String {
        let found = self.disk(Some(name));
        found.map_or_else(|_| name.to_owned(), |disk| disk.name.clone())
    }

    fn pause(&self) -> Result<Value, ControlError> {
        let _change = self.change();
        if !self.is_paused() {
            if let Power::Guest { control, .. } = &self.power {
                control.pause();
            }
            let mut running = self.disks();
            running.retain(|disk| !disk.paused.load(Ordering::SeqCst));
            let paused = running.iter().try_for_each(|disk| self.end_requests(disk));
            if let Err(error) = paused {
                running.iter().for_each(|disk| disk.device.resume());
                self.resume_guest();
                return Err(error);
            }
            self.paused.store(true, Ordering::SeqCst);
        }
        Ok(json!({ "state": "paused" }))
    }

    fn pause_disk(&self, name: &str) -> Result<Value, ControlError> {
        let _change = self.change();
        let disk = self.disk(Some(name))?;
        let paused = disk.paused.load(Ordering::SeqCst);
        if !paused && !self.is_paused() {
            self.end_requests(&disk)?;
        }
        disk.paused.store(true, Ordering::SeqCst);
        Ok(json!({ "disk": disk.name, "state": "paused" }))
    }

    /// Makes a disk's device take no more requests, and waits until those in flight have ended.
    fn end_requests(&self, disk: &DiskLease) -> Result<(), ControlError> {
        // A limit that holds back requests would delay the pause, and no client could lift it
        // meanwhile.
        let limits = disk.throttle.limits();
        disk.throttle.set(throttle::Limits::default());
        let rests = disk.device.pause();
        self.limit(disk, limits);
        rests.map_err(|error| ControlError::at_disk(&disk.name, error))
    }

    fn resume(&self) {
        let _change = self.change();
        let all = self.paused.swap(false, Ordering::SeqCst);
        for disk in self.disks() {
            if disk.paused.swap(false, Ordering::SeqCst) || all {
                disk.device.resume();
            }
        }
        if all {
            self.resume_guest();
        }
    }

    fn resume_disk(&self, name: &str) -> Result<Value, ControlError> {
        let _change = self.change();
        let disk = self.disk(Some(name))?;
        if self.is_paused() {
            return Err(ControlError::new(
                "all disks are paused: 'walvisor ctl SOCKET resume' without --disk lets them go on",
            ));
        }
        if disk.paused.swap(false, Ordering::SeqCst) {
            disk.device.resume();
        }
        Ok(json!({ "disk": disk.name, "state": "running" }))
    }

    fn resume_guest(&self) {
        if let Power::Guest { control, .. } = &self.power {
            control.resume();
        }
    }

    fn resize(&self, choice: Option<&DiskChoice>, size: u64) -> Result<Value, ControlError> {
        let disk = self.chosen(choice)?;
        let _change = self.change();
        let old_size = disk.backend.sectors() * SECTOR_SIZE;
        if let Some(why) = disk.device.resize_obstacle() {
            return Err(ControlError::at_disk(&disk.name, why));
        }
        grow(&*disk.backend, size).map_err(|error| ControlError::at_disk(&disk.name, error))?;
        disk.device.capacity_changed();
        let size = disk.backend.sectors() * SECTOR_SIZE;
        Ok(json!({ "disk": disk.name, "old_size_bytes": old_size, "size_bytes": size }))
    }

    fn set_cache(&self, name: Option<&str>, cache: CacheChoice) -> Result<Value, ControlError> {
        let disk = self.disk(name)?;
        if !disk.backend.capabilities().write_cache_toggle {
            let why = "its cache mode cannot be changed";
            return Err(ControlError::at_disk(&disk.name, why));
        }
        let _change = self.change();
        let on = disk.device.set_write_cache(cache == CacheChoice::Writeback);
        if !on {
            // Writes that completed before the change must be as durable as later ones.
            flush(&*disk.backend).map_err(|error| ControlError::at_disk(&disk.name, error))?;
        }
        Ok(json!({
            "disk": disk.name,
            "requested": cache,
            "cache": cache_in_force(&*disk.backend),
        }))
    }

    fn set_limit(&self, wanted: &LimitChange) -> Result<Value, ControlError> {
        let disk = self.disk(wanted.disk.as_deref())?;
        let _change = self.change();
        let mut limits = disk.throttle.limits();
        if let Some(weight) = wanted.weight {
            if !(1..=throttle::MAX_WEIGHT).contains(&weight) {
                return Err(ControlError::new(format_args!(
                    "weight {weight}: give a number from 1 to {}",
                    throttle::MAX_WEIGHT
                )));
            }
            limits.weight = weight;
        }
        // A burst belongs to its rate, so a new rate resets the burst.
        for (rate, burst, new_rate, new_burst) in [
            (
                &mut limits.ops_per_second,
                &mut limits.ops_burst,
                wanted.ops_per_second,
                wanted.ops_burst,
            ),
            (
                &mut limits.bytes_per_second,
                &mut limits.bytes_burst,
                wanted.bytes_per_second,
                wanted.bytes_burst,
            ),
        ] {
            if let Some(new_rate) = new_rate {
                (*rate, *burst) = (new_rate, 0);
            }
            *burst = new_burst.unwrap_or(*burst);
            if *rate == 0 && *burst > 0 {
                return Err(ControlError::new(
                    "a burst needs a limit: give the operations or bytes per second too",
                ));
            }
        }
        self.limit(&disk, limits);
        let mut answer = stats::limits(&disk.throttle);
        answer["disk"] = disk.name.clone().into();
        Ok(answer)
    }

    /// Adds and removes disks.
    fn hotplug(&self) -> Result<&dyn DiskHotplug, ControlError> {
        match &self.power {
            Power::Daemon {
                hotplug: Some(hotplug),
                ..
            } => Ok(&**hotplug),
            Power::Daemon { hotplug: None, .. } => Err(ControlError::new(format_args!(
                "'walvisor {}' cannot add or remove disks: restart it with the disks that you want",
                self.kind.words()
            ))),
            Power::Guest { .. } => Err(ControlError::new(
                "the disks of a guest are fixed: this monitor has no hot-plug; stop the guest and \
                 start it with other disks, or use 'walvisor serve vhost-user' with a monitor that \
                 has hot-plug",
            )),
        }
    }

    /// The configuration file, and what it has to say.
    fn config(&self, saved: &[String]) -> Result<Value, ControlError> {
        let SavedPool { file, disks, left } = self.hotplug()?.config(saved).ok_or_else(|| {
            ControlError::new(
                "this daemon has no configuration file: start it with --config FILE, or give it \
                 other --disk the next time",
            )
        })?;
        let disks = disks.iter();
        let path = |path: &Path| path.display().to_string();
        let disks = disks.map(|disk| {
            let log = disk.log.as_deref().map(path);
            json!({ "disk": disk.name, "spec": disk.spec, "log": log })
        });
        let left = left.iter();
        let left = left.map(|(log, image)| json!({ "log": path(log), "image": path(image) }));
        Ok(json!({
            "config": file,
            "kind": self.kind.name(),
            "disks": disks.collect::<Vec<_>>(),
            "detached": left.collect::<Vec<_>>(),
        }))
    }

    /// Refuses to add a disk while all are paused.
    pub(crate) fn refuse_while_paused(&self) -> Result<(), ControlError> {
        if self.is_paused() {
            return Err(ControlError::new(
                "the disks are paused: add the disk after 'walvisor ctl SOCKET resume'",
            ));
        }
        Ok(())
    }

    /// Lists a disk that is served from now on. Returns the answer for clients.
    pub(crate) fn list_added(&self, AddedDisk { disk, place }: AddedDisk) -> Value {
        let answer = json!({
            "disk": disk.name,
            "size_bytes": disk.backend.sectors() * SECTOR_SIZE,
            "place": place,
            "log": log_name(&*disk.backend),
        });
        self.publish(disk);
        answer
    }

    /// Makes a served disk reachable for requests.
    fn publish(&self, disk: DiskInUse) {
        let _change = self.change();
        if self.is_paused()
            && let Err(error) = disk.device.pause()
        {
            tracing::warn!("disk '{}' is not paused: {error}", disk.name);
        }
        self.list(disk.clone());
        self.apply_end(&disk);
    }

    /// Stops serving a disk, and closes it. Returns the answer for clients. `keep_records`: see
    /// [`Store::remove_disk_keeping_records`](walvisor_storage::Store::remove_disk_keeping_records).
    pub(crate) fn remove_disk(
        &self,
        name: &str,
        keep_records: bool,
    ) -> Result<Value, ControlError> {
        let hotplug = self.hotplug()?;
        let disk = self.disk(Some(name))?;
        let name = &disk.name.clone();
        let log = log_name(&*disk.backend);
        // A limit that holds back requests would delay the removal, and so would waits.
        let limits = disk.throttle.limits();
        disk.throttle.set(throttle::Limits::default());
        disk.backend.limit_waits();
        drop(disk);
        if !self.take_off(name) {
            return Err(ControlError::no_such_disk(format_args!(
                "no disk '{name}': another client has removed it"
            )));
        }
        let note = match hotplug.remove(name, keep_records) {
            Ok(RemovedDisk::Complete) => None,
            Ok(RemovedDisk::InLog) => Some(
                "the log keeps history, and with it this disk's newest records: open the disk \
                 together with its log",
            ),
            Ok(RemovedDisk::Kept) => Some(
                "what the image lacks is in a file beside the log: open the disk together with its \
                 log",
            ),
            Ok(RemovedDisk::Unfetched) => Some(
                "'walvisor archive restore' has not fetched all of its image: open the disk \
                 together with its log, or run the restore again to its end",
            ),
            Err(RemovalError { reason, disk }) => {
                if let Some(disk) = disk {
                    disk.throttle.set(limits);
                    self.publish(disk);
                }
                return Err(ControlError::at_disk(name, reason));
            }
        };
        let image = note.map_or("complete", |_| "incomplete");
        let mut answer = json!({ "disk": name, "image": image, "log": log });
        if let Some(note) = note {
            answer["note"] = note.into();
        }
        Ok(answer)
    }

    fn checkpoint(
        &self,
        choice: Option<&DiskChoice>,
        give_up_history: bool,
    ) -> Result<Value, ControlError> {
        let disks = match choice {
            Some(_) => vec![self.chosen(choice)?],
            None => self.disks(),
        };
        let mut given_up = BTreeMap::new();
        for disk in &disks {
            if !give_up_history {
                self.refuse_loss(disk)?;
            } else if let Some(log) = log_name(&*disk.backend)
                && !given_up.contains_key(&log)
                && let Some((history, names)) = self.kept_history(disk)
            {
                let lost = given_up_json(&log, &names, &history);
                given_up.insert(log, lost);
            }
        }
        let mut done = Vec::new();
        for disk in disks {
            // A disk without a log has nothing to copy.
            if let Some(logged) = disk.backend.logged() {
                let copied = logged.checkpoint();
                copied.map_err(|error| ControlError::at_disk(&disk.name, error))?;
            }
            done.push(disk.name.clone());
        }
        let mut answer = json!({ "disks": done });
        if !given_up.is_empty() {
            answer["history_given_up"] = given_up.into_values().collect();
        }
        Ok(answer)
    }

    fn set_retain(
        &self,
        choice: Option<&DiskChoice>,
        retain: &str,
        give_up_history: bool,
    ) -> Result<Value, ControlError> {
        let kept: Retention = retain.parse().map_err(ControlError::new)?;
        let disk = self.disk_of_log(choice)?;
        in_log(&disk, |logged| {
            let kept_of = || self.kept_history(&disk).map(|(_, names)| names);
            let names = || kept_of().unwrap_or_default();
            let log = json!(log_name(&*disk.backend));
            set_retention(logged, log, kept, give_up_history, names)
        })?
        .map_err(|why| ControlError::at_disk(&disk.name, why))
    }

    /// The history that the log of a disk keeps, if any, and the names of all disks that have it:
    /// those that are not open have the paths that the log knows.
    fn kept_history(&self, disk: &DiskLease) -> Option<(LogHistory, Vec<String>)> {
        let logged = logged(&*disk.backend)?;
        let history = logged.history();
        if history.retain == Retention::Nothing {
            return None;
        }
        let log = log_name(&*disk.backend);
        let mut open = self.disks();
        open.retain(|other| log_name(&*other.backend) == log);
        let name_of = |id: u32| {
            let number = |other: &&DiskLease| crate::disk::logged(&*other.backend).map(Disk::id);
            let found = open.iter().find(|other| number(other) == Some(id));
            found.map(|other| other.name.clone())
        };
        let named = |(id, path): (u32, PathBuf)| {
            name_of(id).unwrap_or_else(|| {
                if path.as_os_str().is_empty() {
                    format!("disk {id}")
                } else {
                    path.display().to_string()
                }
            })
        };
        let names = match logged.members() {
            Ok(members) => members.into_iter().map(named).collect(),
            // The checkpoint will say why.
            Err(_) => open.iter().map(|other| other.name.clone()).collect(),
        };
        Some((history, names))
    }

    /// Refuses a checkpoint of a disk whose log keeps history: the checkpoint would end it for all
    /// disks of the log.
    fn refuse_loss(&self, disk: &DiskLease) -> Result<(), ControlError> {
        let Some((history, names)) = self.kept_history(disk) else {
            return Ok(());
        };
        refuse_checkpoint(&history, names).map_err(|error| ControlError::at_disk(&disk.name, error))
    }

    /// Holds a log for a client to read. `before`: what was held for it, which then ends.
    pub(super) fn hold(
        &self,
        log: &Path,
        before: Option<ReadHold>,
    ) -> Result<(Value, ReadHold), ControlError> {
        let kept = before.as_ref().map(ReadHold::is_kept);
        drop(before);
        let disk = self.disks().into_iter().find(|disk| is_on(disk, log));
        let disk = disk.ok_or_else(|| {
            let (log, process) = (log.display(), std::process::id());
            ControlError::no_such_disk(format_args!(
                "{log}: process {process} serves no disk on this log"
            ))
        })?;
        let hold = in_log(&disk, Disk::hold_to_read)?;
        Ok((
            json!({ "newest_lsn": hold.newest_lsn(), "kept": kept }),
            hold,
        ))
    }

    /// Makes a disk what it was at a point. The disk is paused, so none of its requests is in
    /// flight.
    fn restore(&self, choice: Option<&DiskChoice>, at: &str) -> Result<Value, ControlError> {
        let at = at.parse().map_err(ControlError::new)?;
        let _change = self.change();
        let disk = self.chosen(choice)?;
        let name = &disk.name;
        if !self.is_paused() && !disk.paused.load(Ordering::SeqCst) {
            return Err(ControlError::new(format_args!(
                "restore: disk '{name}' is in use: unmount it in its guest, or end what uses it, \
                 then 'walvisor ctl SOCKET pause --disk {name}', restore, and 'resume --disk \
                 {name}'",
            )));
        }
        let mut answer = rewound_json(&in_log(&disk, |disk| disk.rewind(at))?);
        answer["disk"] = name.as_str().into();
        Ok(answer)
    }

    /// Serves a disk as of a point. `files`: the listening socket; an empty file, if the look can
    /// be written; and descriptors to close when the look ends.
    pub(super) fn look(
        &self,
        request: &LookRequest,
        files: Vec<OwnedFd>,
    ) -> Result<Value, ControlError> {
        let at = request.at.parse().map_err(ControlError::new)?;
        let mut files = files.into_iter();
        let listener = files
            .next()
            .ok_or_else(|| missing("a socket that listens"))?;
        if !matches!(sockopt::socket_acceptconn(&listener), Ok(true)) {
            return Err(missing("a socket that listens"));
        }
        let scratch = if request.scratch {
            Some(files.next().ok_or_else(|| missing("an empty file"))?.into())
        } else {
            None
        };
        let disk = self.chosen(request.disk.as_ref())?;
        let name = &disk.name;
        let look = in_log(&disk, |disk| disk.look(at, scratch))?;
        let served = self
            .looks
            .serve(name, look, request, listener.into(), files.collect());
        served.map_err(|error| ControlError::at_disk(name, error))
    }

    /// Copies a disk, as of now or of a point, to an empty file. `progress`: see
    /// [`Logged::export`](walvisor_devices::backend::Logged::export).
    pub(super) fn export(
        &self,
        choice: Option<&DiskChoice>,
        at: Option<&str>,
        file: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Value, ControlError> {
        let disk = self.chosen(choice)?;
        let listed = self.exports.begin(&disk.name, at);
        let progress = &mut |passed, total| listed.note(passed, total) && progress(passed, total);
        let at = at.map(str::parse).transpose().map_err(ControlError::new)?;
        let done = match at {
            Some(at) => in_log(&disk, |disk| disk.export_at(at, file, progress))?,
            None => {
                let failed = |error: &dyn Display| ControlError::at_disk(&disk.name, error);
                let logged = disk.backend.logged().ok_or_else(|| {
                    failed(
                        &"a disk without a log can't be exported while it is in use; copy it \
                          through the door that serves it, or close it and copy its image",
                    )
                })?;
                let copied = logged.export(file, progress);
                copied.map_err(|error| failed(&error))?
            }
        };
        Ok(json!({ "disk": disk.name, "size_bytes": done.size, "copied_bytes": done.copied }))
    }
}

/// Whether a disk is on the log in this directory.
fn is_on(disk: &DiskLease, log: &Path) -> bool {
    let logged = disk.backend.logged();
    logged.is_some_and(|logged| same_file(logged.log_dir(), log))
}

/// Whether two paths name one file or directory.
fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino()));
    matches!((id(one), id(other)), (Ok(one), Ok(other)) if one == other)
}

/// Runs `action` on a disk that has a log.
fn in_log<T>(
    disk: &DiskLease,
    action: impl FnOnce(&walvisor_storage::Disk) -> walvisor_storage::Result<T>,
) -> Result<T, ControlError> {
    let failed = |error: &dyn Display| ControlError::at_disk(&disk.name, error);
    let logged = logged(&*disk.backend);
    let logged = logged.ok_or_else(|| failed(&"it has no log, so it has no history"))?;
    action(logged).map_err(|error| failed(&error))
}

/// The error for a look without a descriptor that it needs.
fn missing(what: &str) -> ControlError {
    ControlError::new(format_args!(
        "look: the descriptor of {what} is missing: send it with the request (SCM_RIGHTS), as \
         'walvisor ctl' does"
    ))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::thread;

    use walvisor_devices::backend::ram::RamDisk;
    use walvisor_devices::control::DeviceControl;

    use super::*;
    use crate::control_socket::fixture;

    /// A device that changes its cache mode, or pauses, only when the test lets it.
    struct SlowDevice {
        came: Mutex<Sender<()>>,
        go: Mutex<Receiver<()>>,
    }

    impl SlowDevice {
        fn wait(&self) {
            self.came.lock().unwrap().send(()).unwrap();
            self.go.lock().unwrap().recv().unwrap();
        }
    }

    impl DeviceControl for SlowDevice {
        fn capacity_changed(&self) {}

        fn set_write_cache(&self, on: bool) -> bool {
            self.wait();
            on
        }

        fn pause(&self) -> io::Result<()> {
            self.wait();
            Ok(())
        }

        fn resume(&self) {}
    }

    /// A daemon with one slow disk, a receiver that gets each call to its device, and a sender that
    /// lets the call return.
    fn daemon() -> (ControlledProcess, Receiver<()>, Sender<()>) {
        let ((came, comes), (go, goes)) = (channel(), channel());
        let device = Arc::new(SlowDevice {
            came: Mutex::new(came),
            go: Mutex::new(goes),
        });
        let disk = fixture::disk("disk", RamDisk::new(8));
        let controlled = fixture::daemon(vec![DiskInUse { device, ..disk }]);
        (controlled, comes, go)
    }

    fn state(controlled: &ControlledProcess) -> Value {
        let stats = controlled
            .execute(&ControlCommand::Stats {
                format: StatsFormat::Json,
            })
            .unwrap();
        stats["state"].clone()
    }

    #[test]
    fn stats_are_answered_while_another_client_changes_something() {
        let (controlled, comes, go) = daemon();
        let during = |command: &ControlCommand, expected: &str| {
            thread::scope(|scope| {
                let other = scope.spawn(|| controlled.execute(command));
                comes.recv().unwrap();
                assert_eq!(state(&controlled), expected, "during {command:?}");
                go.send(()).unwrap();
                other.join().unwrap().unwrap();
            });
        };
        let set_cache = ControlCommand::SetCache {
            disk: None,
            cache: CacheChoice::Writeback,
        };
        during(&set_cache, "running");
        // The pause has not ended, so the state is still "running".
        during(&ControlCommand::Pause { disk: None }, "running");
        assert_eq!(state(&controlled), "paused");
        during(&set_cache, "paused");
        assert_eq!(state(&controlled), "paused");
        controlled
            .execute(&ControlCommand::Resume { disk: None })
            .unwrap();
        assert_eq!(state(&controlled), "running");
    }

    #[test]
    fn a_weight_is_changed_alone_and_only_to_a_valid_one() {
        let (controlled, _comes, _go) = daemon();
        let weigh = |weight| {
            controlled.execute(&ControlCommand::SetLimit(LimitChange {
                weight: Some(weight),
                ..LimitChange::default()
            }))
        };
        let answer = weigh(200).unwrap();
        assert_eq!(
            (&answer["weight"], &answer["ops_per_second"]),
            (&json!(200), &json!(0))
        );
        for wrong in [0, 1001] {
            let refused = weigh(wrong).unwrap_err().to_string();
            assert!(refused.contains("from 1 to 1000"), "{refused}");
        }
        assert_eq!(controlled.disks()[0].throttle.weight(), 200);
    }

    #[test]
    fn no_limit_survives_the_beginning_of_shutdown() {
        let (controlled, comes, go) = daemon();
        let limits = |controlled: &ControlledProcess| controlled.disks()[0].throttle.limits();
        let one = ControlCommand::SetLimit(LimitChange {
            ops_per_second: Some(1),
            ..LimitChange::default()
        });
        controlled.execute(&one).unwrap();
        assert_eq!(limits(&controlled).ops_per_second, 1);
        thread::scope(|scope| {
            let pause = scope.spawn(|| controlled.execute(&ControlCommand::Pause { disk: None }));
            comes.recv().unwrap();
            controlled.lift_limits();
            // The pause restores the limit after this, unless it sees the end.
            go.send(()).unwrap();
            pause.join().unwrap().unwrap();
        });
        assert_eq!(limits(&controlled).ops_per_second, 0);
        controlled.execute(&one).unwrap();
        assert_eq!(limits(&controlled).ops_per_second, 0);
    }
}
