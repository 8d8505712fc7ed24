//! One command in flight: its backend operations and its outcome.

use super::command;
use super::data::DataBuffer;
use super::job::{Change, Job, Range, ScsiAction, Then};
use super::order::OrderTicket;
use super::plan::CommandPlan;
use super::sense::{Sense, SenseData, Status};
use super::unit::LogicalUnit;
use crate::backend::{Buffer, Failure, Operation, SECTOR_SIZE};
use crate::latency::OperationKind;

/// The most operations of one command in flight.
const MAX_IN_FLIGHT: usize = 32;
/// Longest write of a WRITE SAME in bytes: the block repeated.
const FILL_PART: usize = 1 << 20;
/// Bytes of a data buffer compared at once.
const COMPARED: usize = 4096;

/// The transport's next step for a task.
#[derive(Debug)]
pub enum TaskStep {
    /// Submit this operation, then call [`Task::next`] again.
    Submit(Operation),
    /// Wait until an operation of this task has ended.
    InFlight,
    /// Wait until another task of the unit is over: the two must not overlap.
    Blocked,
    /// The command has ended.
    Done,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOutcome {
    /// The status.
    pub status: Status,
    /// With CHECK CONDITION, the reason.
    pub sense: Option<SenseData>,
    /// Valid bytes at the start of the Data-In Buffer. `None`: the command receives no data, or it failed.
    pub data_in: Option<usize>,
}

/// One command in flight.
pub struct Task {
    job: Job,
    /// The next action.
    at: usize,
    /// Blocks of the range filled, or ranges of the list discarded, including those in flight.
    progress: usize,
    in_flight: usize,
    /// How the blocks of the read in flight are used; `None`: no read is in flight.
    then: Option<Then>,
    ticket: Option<OrderTicket>,
    data_in: Option<usize>,
    failed: Option<(Status, Option<SenseData>)>,
}

impl Task {
    /// Checks a command before any of its work is done: finds it, and checks its CDB and its parameter list if any.
    ///
    /// `cdb` may be longer than the command's CDB. `data` is the same for all calls of one task.
    pub fn new(unit: &LogicalUnit, cdb: &[u8], data: &dyn DataBuffer) -> Self {
        let (job, data_in, failed) = match command::judge(unit, cdb, data) {
            Ok(CommandPlan::Run(job)) => (job, None, None),
            Ok(CommandPlan::Answer { bytes, allocation }) => {
                let len = bytes.len().min(allocation).min(data.len());
                data.write(0, &bytes[..len]);
                (Job::nothing(), Some(len), None)
            }
            Err(sense) => {
                let data = sense.data(unit.descriptor_sense());
                let failed = (Status::CheckCondition, Some(data));
                (Job::nothing(), None, Some(failed))
            }
        };
        let ticket = (job.change != Change::None).then(|| {
            let all = || {
                job.list
                    .iter()
                    .chain([&job.range])
                    .filter(|range| range.blocks > 0)
            };
            let start = all().map(|range| range.lba).min();
            let end = all().map(|range| range.lba + u64::from(range.blocks)).max();
            let alone = job.change == Change::Alone;
            unit.order
                .enter(start.unwrap_or(0), end.unwrap_or(0), alone)
        });
        Self {
            job,
            at: 0,
            progress: 0,
            in_flight: 0,
            then: None,
            ticket,
            data_in,
            failed,
        }
    }

    /// The kind under which the command's latency counts; `None` for a command that is neither I/O nor a flush.
    pub fn kind(&self) -> Option<OperationKind> {
        self.job.kind
    }

    /// The most bytes of backend buffers that the command uses at any time.
    pub fn bytes(&self, unit: &LogicalUnit) -> usize {
        let range = self.job.range.blocks as usize * unit.block_size() as usize;
        let most = self.job.script.iter().flatten().map(|action| match action {
            ScsiAction::Read(_) | ScsiAction::Write { .. } => range,
            ScsiAction::Fill => range.min(FILL_PART),
            ScsiAction::Flush | ScsiAction::Zero { .. } | ScsiAction::Unmap => 0,
        });
        most.max().unwrap_or(0)
    }

    /// The transport's next step.
    pub fn next(&mut self, unit: &LogicalUnit, data: &dyn DataBuffer) -> TaskStep {
        let idle = match self.in_flight {
            0 => TaskStep::Done,
            _ => TaskStep::InFlight,
        };
        if self.failed.is_some() {
            return idle;
        }
        if self
            .ticket
            .as_ref()
            .is_some_and(|ticket| !ticket.admitted())
        {
            return TaskStep::Blocked;
        }
        let Some(action) = self.job.script.get(self.at).copied().flatten() else {
            return idle;
        };
        // Only the ranges of one list run side by side.
        let most = match action {
            ScsiAction::Unmap if self.progress > 0 => MAX_IN_FLIGHT,
            _ => 1,
        };
        if self.in_flight >= most {
            return TaskStep::InFlight;
        }
        let operation = self.operation(unit, data, action);
        self.in_flight += 1;
        TaskStep::Submit(operation)
    }

    /// The next operation of `action`, which may have more of them.
    fn operation(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        action: ScsiAction,
    ) -> Operation {
        let per_block = unit.sectors_per_block();
        let block = unit.block_size() as usize;
        let Range { lba, blocks } = self.job.range;
        let sector = lba * per_block;
        // A job's range has at most 2^32 - 1 sectors.
        let sectors = blocks * per_block as u32;
        self.at += 1;
        self.then = None;
        match action {
            ScsiAction::Flush => Operation::Flush,
            ScsiAction::Read(then) => {
                self.then = Some(then);
                Operation::Read { sector, sectors }
            }
            ScsiAction::Write { from } => {
                // `read` fills the whole buffer.
                let mut payload = Buffer::for_overwrite(blocks as usize * block);
                data.read(from, &mut payload);
                let data = payload;
                Operation::Write { sector, data }
            }
            ScsiAction::Fill => {
                let left = blocks as usize - self.progress;
                let most = unit.max_transfer_bytes().min(FILL_PART) / block;
                let part = left.min(most);
                let mut payload = Buffer::for_overwrite(part * block);
                data.read(0, &mut payload[..block]);
                let mut filled = block;
                while filled < payload.len() {
                    let more = filled.min(payload.len() - filled);
                    payload.copy_within(..more, filled);
                    filled += more;
                }
                let sector = sector + self.progress as u64 * per_block;
                self.progress = if part < left {
                    self.at -= 1;
                    self.progress + part
                } else {
                    0
                };
                let data = payload;
                Operation::Write { sector, data }
            }
            ScsiAction::Zero { unmap } => {
                let can = unit.can();
                match unmap && !can.write_zeroes {
                    true => Operation::Discard { sector, sectors },
                    false => Operation::WriteZeroes {
                        sector,
                        sectors,
                        unmap,
                    },
                }
            }
            ScsiAction::Unmap => {
                let range = self.job.list[self.progress];
                self.progress += 1;
                if self.progress < self.job.list.len() {
                    self.at -= 1;
                } else {
                    self.progress = 0;
                }
                Operation::Discard {
                    sector: range.lba * per_block,
                    sectors: range.blocks * per_block as u32,
                }
            }
        }
    }

    /// Takes the result of an operation of this task.
    pub fn ended(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        result: Result<Option<Buffer>, Failure>,
    ) {
        self.in_flight = self.in_flight.saturating_sub(1);
        // The first failure counts.
        if self.failed.is_some() {
            return;
        }
        let judged = match (result, self.then) {
            (Ok(Some(blocks)), Some(then)) => self.took(unit, data, &blocks, then),
            (Ok(_), None) => Ok(()),
            // A read without its data has failed too.
            (Ok(None), Some(_)) => Err(Sense::READ_ERROR),
            (Err(failure), Some(_)) => Err(Sense::of(failure, Sense::READ_ERROR)),
            (Err(failure), None) => Err(Sense::of(failure, Sense::WRITE_ERROR)),
        };
        if let Err(sense) = judged {
            let sense = sense.data(unit.descriptor_sense());
            self.failed = Some((Status::CheckCondition, Some(sense)));
            self.data_in = None;
        }
    }

    /// Uses blocks that were read.
    fn took(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        blocks: &[u8],
        then: Then,
    ) -> Result<(), Sense> {
        let block = unit.block_size() as usize;
        if blocks.len() != self.job.range.blocks as usize * block {
            return Err(Sense::READ_ERROR);
        }
        match then {
            Then::Forget => Ok(()),
            Then::Return => {
                let len = blocks.len().min(data.len());
                data.write(0, &blocks[..len]);
                self.data_in = Some(len);
                Ok(())
            }
            Then::Compare => compare(blocks, data, blocks.len()),
            Then::CompareEach => compare(blocks, data, block),
        }
    }

    /// Aborts the command: it submits nothing more, and it ends with TASK ABORTED once nothing is in flight. Operations
    /// already submitted are not undone.
    pub fn abort(&mut self) {
        self.failed = Some((Status::TaskAborted, None));
        self.data_in = None;
    }

    /// How the command ended, after [`TaskStep::Done`].
    pub fn outcome(self) -> TaskOutcome {
        let (status, sense) = self.failed.unwrap_or((Status::Good, None));
        TaskOutcome {
            status,
            sense,
            data_in: self.data_in,
        }
    }
}

/// Compares blocks with the first `period` bytes of the data buffer, repeated.
fn compare(blocks: &[u8], data: &dyn DataBuffer, period: usize) -> Result<(), Sense> {
    let mut piece = [0; COMPARED];
    // Each block size divides `COMPARED`, or is a multiple of it.
    for (index, blocks) in blocks.chunks(COMPARED.min(period)).enumerate() {
        let offset = index * COMPARED.min(period) % period;
        let expected = &mut piece[..blocks.len()];
        data.read(offset, expected);
        if let Some(at) = blocks
            .iter()
            .zip(&*expected)
            .position(|(is, should)| is != should)
        {
            return Err(Sense::miscompare((offset + at) as u64));
        }
    }
    Ok(())
}

const _: () =
    assert!(COMPARED.is_multiple_of(SECTOR_SIZE as usize) && FILL_PART.is_multiple_of(4096));
