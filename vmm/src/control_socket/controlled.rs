//! What a control socket controls: disks in use, and the vCPUs of a VM.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use walvisor_devices::backend::{Backend, SECTOR_SIZE, flush};
use walvisor_devices::block::BlockMetrics;
use walvisor_devices::control::DeviceControl;
use walvisor_devices::throttle::{self, Throttle};

use super::command::{CacheChoice, Command, ControlError, Format, Limits};
use super::stats;
use crate::vm::control::Control;
use crate::vm::exits::ExitCounters;
use crate::vm::{AttachedDisk, Vm};

/// What the process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `walvisor run`
    Run,
    /// `walvisor serve nbd`
    Nbd,
    /// `walvisor serve vhost-user`
    VhostUser,
    /// `walvisor serve tcmu`
    Tcmu,
}

impl Kind {
    /// As the command line says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
            Self::Tcmu => "tcmu",
        }
    }
}

/// A disk in use.
#[derive(Clone)]
pub struct ControlledDisk {
    /// What requests call it.
    pub name: String,
    /// How it is reached: `mmio`, `pci`, `nbd`, `vhost-user`, `tcmu`.
    pub transport: &'static str,
    /// What keeps its data.
    pub backend: Arc<dyn Backend>,
    /// What was asked of it.
    pub metrics: Arc<BlockMetrics>,
    /// How much of it may be used.
    pub throttle: Arc<Throttle>,
    /// How its users are told.
    pub device: Arc<dyn DeviceControl>,
}

impl From<&AttachedDisk> for ControlledDisk {
    fn from(disk: &AttachedDisk) -> Self {
        Self {
            name: disk.name.clone(),
            transport: disk.transport(),
            backend: Arc::clone(&disk.backend),
            metrics: Arc::clone(&disk.metrics),
            throttle: Arc::clone(&disk.throttle),
            device: Arc::clone(&disk.device),
        }
    }
}

/// Who is told that the end was asked for.
pub enum Power {
    /// A VM's run.
    Guest {
        /// Its end and its pauses.
        control: Arc<Control>,
        /// Its exits, by vCPU.
        exits: Vec<Arc<ExitCounters>>,
        /// The moment just before the first KVM_RUN.
        first_run: Arc<OnceLock<Instant>>,
    },
    /// A daemon.
    Daemon(Box<dyn Fn() + Send + Sync>),
}

/// What there is to control. See the module's documentation.
pub struct Controlled {
    pub(super) kind: Kind,
    pub(super) started: Instant,
    pub(super) disks: Vec<ControlledDisk>,
    pub(super) power: Power,
    /// Whether it is paused. Locked by whoever changes anything.
    paused: Mutex<bool>,
}

impl Controlled {
    /// `started` is when the process began.
    pub fn new(kind: Kind, started: Instant, disks: Vec<ControlledDisk>, power: Power) -> Self {
        Self {
            kind,
            started,
            disks,
            power,
            paused: Mutex::new(false),
        }
    }

    /// A VM that is about to run.
    pub fn vm(vm: &Vm, started: Instant) -> Self {
        let power = Power::Guest {
            control: vm.control(),
            exits: vm.exits().to_vec(),
            first_run: vm.first_run(),
        };
        let disks = vm.disks().iter().map(ControlledDisk::from).collect();
        Self::new(Kind::Run, started, disks, power)
    }

    /// The end has come, which no limit is to hold up.
    pub(crate) fn lift_limits(&self) {
        for disk in &self.disks {
            disk.throttle.set(throttle::Limits::default());
        }
    }

    fn change(&self) -> MutexGuard<'_, bool> {
        // A flag is right between any two steps.
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out a request.
    pub(super) fn execute(&self, command: &Command) -> Result<Value, ControlError> {
        match command {
            Command::Stats(Format::Json) => Ok(stats::json(self)),
            Command::Stats(Format::Prometheus) => Ok(json!({ "text": stats::prometheus(self) })),
            Command::Pause => self.pause(),
            Command::Resume => {
                self.resume(&mut self.change());
                Ok(json!({ "state": "running" }))
            }
            Command::Resize { disk, size_bytes } => self.resize(disk.as_deref(), *size_bytes),
            Command::SetCache { disk, cache } => self.set_cache(disk.as_deref(), *cache),
            Command::SetLimit { disk, limits } => self.set_limit(disk.as_deref(), limits),
            Command::Checkpoint { disk } => self.checkpoint(disk.as_deref()),
            Command::Shutdown { now: false } => {
                // Who rests cannot end in order.
                self.resume(&mut self.change());
                Ok(json!({}))
            }
            Command::Shutdown { now: true } => Ok(json!({})),
        }
    }

    /// What is to happen once a request is answered.
    pub(super) fn answered(&self, command: &Command) {
        let Command::Shutdown { now } = command else {
            return;
        };
        match &self.power {
            Power::Guest { control, .. } if *now => control.end(crate::vm::control::Ended::Quit),
            Power::Guest { control, .. } => control.ask_for_power_down(),
            Power::Daemon(end) => end(),
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        // Not the lock: whoever changes something may take his time.
        match &self.power {
            Power::Guest { control, .. } => control.paused(),
            Power::Daemon(_) => self.paused.try_lock().is_ok_and(|paused| *paused),
        }
    }

    /// The disk of that name, or the only one.
    fn disk(&self, name: Option<&str>) -> Result<&ControlledDisk, ControlError> {
        let names = || {
            let names: Vec<_> = self.disks.iter().map(|disk| disk.name.as_str()).collect();
            names.join(", ")
        };
        let found: Vec<_> = match name {
            Some(name) => self.disks.iter().filter(|disk| disk.name == name).collect(),
            None => self.disks.iter().collect(),
        };
        match (&found[..], name) {
            ([disk], _) => Ok(disk),
            ([], Some(name)) => Err(ControlError::no_such_disk(format_args!(
                "no disk '{name}': there are {}",
                names()
            ))),
            ([], None) => Err(ControlError::no_such_disk("there is no disk")),
            (_, Some(name)) => Err(ControlError::no_such_disk(format_args!(
                "several disks are called '{name}': give each its own serial="
            ))),
            (_, None) => Err(ControlError::no_such_disk(format_args!(
                "say which disk: {}",
                names()
            ))),
        }
    }

    fn pause(&self) -> Result<Value, ControlError> {
        let mut paused = self.change();
        if !*paused {
            if let Power::Guest { control, .. } = &self.power {
                control.pause();
            }
            *paused = true;
            for disk in &self.disks {
                // What is held back would hold up the pause, for as long as nobody may lift the limits.
                let limits = disk.throttle.limits();
                disk.throttle.set(throttle::Limits::default());
                let rests = disk.device.pause();
                disk.throttle.set(limits);
                if let Err(error) = rests {
                    self.resume(&mut paused);
                    let name = &disk.name;
                    return Err(ControlError::new(format_args!("disk '{name}': {error}")));
                }
            }
        }
        Ok(json!({ "state": "paused" }))
    }

    fn resume(&self, paused: &mut bool) {
        if !std::mem::take(paused) {
            return;
        }
        self.disks.iter().for_each(|disk| disk.device.resume());
        if let Power::Guest { control, .. } = &self.power {
            control.resume();
        }
    }

    fn resize(&self, name: Option<&str>, size: u64) -> Result<Value, ControlError> {
        let disk = self.disk(name)?;
        let _change = self.change();
        let old_size = disk.backend.sectors() * SECTOR_SIZE;
        disk.backend
            .grow(size)
            .map_err(|error| ControlError::new(format_args!("disk '{}': {error}", disk.name)))?;
        disk.device.capacity_changed();
        let size = disk.backend.sectors() * SECTOR_SIZE;
        Ok(json!({ "disk": disk.name, "old_size_bytes": old_size, "size_bytes": size }))
    }

    fn set_cache(&self, name: Option<&str>, cache: CacheChoice) -> Result<Value, ControlError> {
        let disk = self.disk(name)?;
        let failed = |error: &dyn std::fmt::Display| {
            ControlError::new(format_args!("disk '{}': {error}", disk.name))
        };
        if !disk.backend.capabilities().write_cache_toggle {
            return Err(failed(&"its cache mode cannot be changed"));
        }
        let _change = self.change();
        let on = disk.device.set_write_cache(cache == CacheChoice::Writeback);
        if !on {
            // What was written before is to be as stable as what comes.
            flush(&*disk.backend).map_err(|error| failed(&error))?;
        }
        Ok(json!({ "disk": disk.name, "requested": cache, "cache": stats::cache(&*disk.backend) }))
    }

    fn set_limit(&self, name: Option<&str>, wanted: &Limits) -> Result<Value, ControlError> {
        let disk = self.disk(name)?;
        let _change = self.change();
        let mut limits = disk.throttle.limits();
        // A burst belongs to its rate: a new rate has its own.
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
                    "a burst is of a limit: give the operations or bytes per second too",
                ));
            }
        }
        disk.throttle.set(limits);
        let mut answer = stats::limits(&disk.throttle);
        answer["disk"] = disk.name.clone().into();
        Ok(answer)
    }

    fn checkpoint(&self, name: Option<&str>) -> Result<Value, ControlError> {
        let disks = match name {
            Some(name) => vec![self.disk(Some(name))?],
            None => self.disks.iter().collect(),
        };
        let mut done = Vec::new();
        for disk in disks {
            let failed = |error| ControlError::new(format_args!("disk '{}': {error}", disk.name));
            disk.backend.checkpoint().map_err(failed)?;
            done.push(&disk.name);
        }
        Ok(json!({ "disks": done }))
    }
}
