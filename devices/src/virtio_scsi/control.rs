//! The control queue: task management, and asynchronous notification (virtio 1.2, 5.6.6.2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::GuestMemory;

use super::request::{Address, Response};
use super::target::{ScsiTarget, TaskFunction};
use super::worker::{Role, ScsiQueue};
use crate::memory::DeviceMemory;
use crate::reactor::Turn;
use crate::virtio::{
    Chain, GuestRange, MemoryFault, QueueError, ReadableBytes, UsedElement, split_chain,
    write_to_driver,
};

/// VIRTIO_SCSI_T_*: the types of requests.
mod kind {
    pub(super) const TASK_MANAGEMENT: u32 = 0;
    pub(super) const QUERY_EVENTS: u32 = 1;
    pub(super) const SUBSCRIBE: u32 = 2;
}

/// VIRTIO_SCSI_T_TMF_*: the task management functions.
mod function {
    pub(super) const ABORT_TASK: u32 = 0;
    pub(super) const ABORT_TASK_SET: u32 = 1;
    pub(super) const CLEAR_ACA: u32 = 2;
    pub(super) const CLEAR_TASK_SET: u32 = 3;
    pub(super) const I_T_NEXUS_RESET: u32 = 4;
    pub(super) const LOGICAL_UNIT_RESET: u32 = 5;
    pub(super) const QUERY_TASK: u32 = 6;
    pub(super) const QUERY_TASK_SET: u32 = 7;
}

/// Where a request is answered.
struct ControlReply {
    head: u16,
    response: Vec<GuestRange>,
}

impl ControlReply {
    /// # Errors
    /// If there is no room for the answer, so that the driver would take something else for it.
    fn answer<G: GuestMemory>(self, memory: &G, bytes: &[u8]) -> Result<UsedElement, QueueError> {
        let head = self.head;
        let written = write_to_driver(memory, &self.response, bytes).ok();
        let written = written.filter(|written| *written as usize == bytes.len());
        let written = written.ok_or(QueueError::Chain {
            head,
            reason: "it has no room for a response, or that lies outside guest memory",
        })?;
        Ok(UsedElement { head, written })
    }

    fn respond<G: GuestMemory>(
        self,
        memory: &G,
        response: Response,
    ) -> Result<UsedElement, QueueError> {
        self.answer(memory, &[response as u8])
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct ControlQueue {
    /// Functions that the request queues are carrying out.
    running: Vec<(Arc<TaskFunction>, ControlReply)>,
}

impl ControlQueue {
    /// Carries out a request. `None`: it is answered later.
    fn begin<M: DeviceMemory>(
        &mut self,
        target: &ScsiTarget,
        max_descriptors: usize,
        guest: &M::M,
        chain: Chain<'_, M::M>,
    ) -> Result<Option<UsedElement>, QueueError> {
        let head = chain.head();
        let broken = |reason| QueueError::Chain { head, reason };
        let (mut readable, response) = split_chain(chain, max_descriptors).map_err(broken)?;
        let reply = ControlReply { head, response };
        let short = |MemoryFault| broken("its request is short, or lies outside guest memory");
        let units = target.units.len();
        let kind = u32::from_le_bytes(take(&mut readable, guest).map_err(short)?);
        if matches!(kind, kind::QUERY_EVENTS | kind::SUBSCRIBE) {
            let lun = take(&mut readable, guest).map_err(short)?;
            let _wanted: [u8; 4] = take(&mut readable, guest).map_err(short)?;
            let response = match Address::read(lun, units) {
                Address::Unit(_) => Response::Ok,
                Address::NoUnit => Response::IncorrectLun,
                Address::NoTarget => Response::BadTarget,
            };
            // event_actual: a disk has no asynchronous events.
            let answer = reply.answer(guest, &[0, 0, 0, 0, response as u8]);
            return answer.map(Some);
        }
        if kind != kind::TASK_MANAGEMENT {
            // What its response looks like is unknown.
            return reply.answer(guest, &[]).map(Some);
        }
        let subtype = u32::from_le_bytes(take(&mut readable, guest).map_err(short)?);
        let lun = take(&mut readable, guest).map_err(short)?;
        let id = u64::from_le_bytes(take(&mut readable, guest).map_err(short)?);
        let unit = match Address::read(lun, units) {
            Address::NoTarget => return reply.respond(guest, Response::BadTarget).map(Some),
            _ if subtype == function::I_T_NEXUS_RESET => None,
            Address::NoUnit => return reply.respond(guest, Response::IncorrectLun).map(Some),
            Address::Unit(unit) => Some(unit),
        };
        let (id, ends_with) = match subtype {
            function::ABORT_TASK => (Some(id), Some(Response::Aborted)),
            function::ABORT_TASK_SET | function::CLEAR_TASK_SET => (None, Some(Response::Aborted)),
            function::I_T_NEXUS_RESET | function::LOGICAL_UNIT_RESET => {
                (None, Some(Response::Reset))
            }
            function::QUERY_TASK => (Some(id), None),
            function::QUERY_TASK_SET => (None, None),
            // There is never an auto contingent allegiance to clear: NACA is refused.
            function::CLEAR_ACA => return reply.respond(guest, Response::Ok).map(Some),
            _ => return reply.respond(guest, Response::FunctionRejected).map(Some),
        };
        let function = Arc::new(TaskFunction::new(unit, id, ends_with));
        target.links.send(&function);
        self.running.push((function, reply));
        Ok(None)
    }
}

/// The next bytes of a request.
fn take<const N: usize, G: GuestMemory>(
    readable: &mut ReadableBytes,
    memory: &G,
) -> Result<[u8; N], MemoryFault> {
    let mut bytes = [0; N];
    readable.take(memory, &mut bytes).map(|()| bytes)
}

impl<M: DeviceMemory> Role<M> for ControlQueue {
    fn takes_chains(&self, queue: &ScsiQueue<M>) -> bool {
        self.running.len() < usize::from(queue.active.ring.size())
    }

    fn take(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        while !turn.is_over() && Role::<M>::takes_chains(self, queue) {
            let ScsiQueue {
                active,
                target,
                max_descriptors,
                ..
            } = &mut *queue;
            let Some(chain) = active.ring.available(guest)?.next() else {
                return Ok(true);
            };
            turn.charge_request(0);
            let answered = self.begin::<M>(target, *max_descriptors, guest, chain)?;
            queue.batch.extend(answered);
        }
        Ok(false)
    }

    fn answer(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        _turn: &mut Turn<'_>,
        broken: bool,
    ) -> Result<(), QueueError> {
        let done = self
            .running
            .extract_if(.., |(function, _)| function.is_done());
        for (function, reply) in done.collect::<Vec<_>>() {
            if function.ends_with == Some(Response::Reset) {
                queue.target.reset(function.unit);
            }
            let asks = function.ends_with.is_none();
            let response = if asks && function.found.load(Ordering::SeqCst) {
                Response::FunctionSucceeded
            } else {
                Response::Ok
            };
            if !broken {
                queue.batch.push(reply.respond(guest, response)?);
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.running.len()
    }
}
