//! A command in flight: its backend operations and its result.

use super::command;
use super::data::DataBuffer;
use super::job::{AfterRead, BlockAccess, BlockRange, Job, ScsiAction};
use super::order::OrderTicket;
use super::plan::CommandPlan;
use super::sense::{Sense, SenseData, Status};
use super::unit::LogicalUnit;
use crate::backend::{Buffer, Failure, Operation, OutOfMemory, SECTOR_SIZE};
use crate::latency::OperationKind;

/// The most operations that one command has in flight.
const MAX_IN_FLIGHT: usize = 32;
/// The longest write of a WRITE SAME in bytes: copies of the block.
const MAX_FILL_BYTES: usize = 1 << 20;
/// Bytes of a data buffer that are compared at once.
const COMPARE_BYTES: usize = 4096;

/// What the transport has to do next for a task.
#[derive(Debug)]
pub enum TaskStep {
    /// Submit this operation, then call [`Task::next`] again.
    Submit(Operation),
    /// Wait until an operation of this task has ended.
    InFlight,
    /// Wait until another task of the unit has ended: the two must not overlap.
    Blocked,
    /// The command has ended.
    Done,
}

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOutcome {
    /// The status.
    pub status: Status,
    /// The reason for CHECK CONDITION.
    pub sense: Option<SenseData>,
    /// Valid bytes at the start of the Data-In Buffer. `None`: the command returns no data, or it
    /// failed.
    pub data_in: Option<usize>,
}

impl TaskOutcome {
    /// The command did not begin, and may be sent again.
    pub(crate) const BUSY: Self = Self::without_data(Status::Busy);
    /// The command was aborted before it began.
    pub(crate) const ABORTED: Self = Self::without_data(Status::TaskAborted);

    const fn without_data(status: Status) -> Self {
        Self {
            status,
            sense: None,
            data_in: None,
        }
    }
}

/// A command in flight.
pub struct Task {
    job: Job,
    /// Index of the next action.
    next_action: usize,
    /// Blocks of the range filled, or ranges of the list discarded, including those in flight.
    progress: usize,
    in_flight: usize,
    /// What to do with the blocks of the read in flight; `None`: no read is in flight.
    after_read: Option<AfterRead>,
    ticket: Option<OrderTicket>,
    /// Whether it is in the unit's order of commands, if it has to be.
    entered: bool,
    data_in: Option<usize>,
    failed: Option<(Status, Option<SenseData>)>,
}

impl Task {
    /// Looks a command up, and checks its CDB and its parameter list, before any of its work is
    /// done.
    ///
    /// `cdb` may be longer than the command's CDB. `data` must be the same in all calls for one
    /// task.
    pub fn new(unit: &LogicalUnit, cdb: &[u8], data: &dyn DataBuffer) -> Self {
        let mut task = Self::plan(unit, cdb, data);
        task.enter(unit);
        task
    }

    /// As [`new`](Self::new), but other commands wait for this one only from its first
    /// [`next`](Self::next) on.
    pub(crate) fn plan(unit: &LogicalUnit, cdb: &[u8], data: &dyn DataBuffer) -> Self {
        let (job, data_in, failed) = match command::plan_command(unit, cdb, data) {
            Ok(CommandPlan::Run(job)) => (job, None, None),
            Ok(CommandPlan::Answer { bytes, allocation }) => {
                let len = bytes.len().min(allocation).min(data.len());
                data.write(0, &bytes[..len]);
                (Job::without_actions(), Some(len), None)
            }
            Err(sense) => {
                let data = sense.data(unit.descriptor_sense());
                let failed = (Status::CheckCondition, Some(data));
                (Job::without_actions(), None, Some(failed))
            }
        };
        Self {
            job,
            next_action: 0,
            progress: 0,
            in_flight: 0,
            after_read: None,
            ticket: None,
            entered: false,
            data_in,
            failed,
        }
    }

    /// Enters the unit's order of commands, if it has to.
    fn enter(&mut self, unit: &LogicalUnit) {
        let job = &self.job;
        self.entered = true;
        // Atomic writes wait for reads too, which may have half of the blocks by now.
        let listed = job.range.blocks > 0 && unit.max_atomic_blocks() > 0;
        self.ticket = (job.access != BlockAccess::ReadOnly || listed).then(|| {
            let all = || {
                job.list
                    .iter()
                    .chain([&job.range])
                    .filter(|range| range.blocks > 0)
            };
            let start = all().map(|range| range.lba).min();
            let end = all().map(|range| range.lba + u64::from(range.blocks)).max();
            let alone = job.access == BlockAccess::Exclusive;
            unit.order
                .enter(start.unwrap_or(0), end.unwrap_or(0), alone)
        });
    }

    /// The kind that the command's latency counts as; `None` for a command that is neither I/O nor
    /// a flush.
    pub fn kind(&self) -> Option<OperationKind> {
        self.job.kind
    }

    /// The most bytes of backend buffers that the command uses at a time.
    pub fn bytes(&self, unit: &LogicalUnit) -> usize {
        let range = self.job.range.blocks as usize * unit.block_size() as usize;
        let most = self
            .job
            .actions
            .iter()
            .flatten()
            .map(|action| match action {
                ScsiAction::Read(_) | ScsiAction::Write { .. } => range,
                ScsiAction::Fill => range.min(MAX_FILL_BYTES),
                ScsiAction::Flush | ScsiAction::Zero { .. } | ScsiAction::Unmap => 0,
            });
        most.max().unwrap_or(0)
    }

    /// What the transport has to do next.
    pub fn next(&mut self, unit: &LogicalUnit, data: &dyn DataBuffer) -> TaskStep {
        let idle = if self.in_flight == 0 {
            TaskStep::Done
        } else {
            TaskStep::InFlight
        };
        if self.failed.is_some() {
            return idle;
        }
        if !self.entered {
            self.enter(unit);
        }
        if self
            .ticket
            .as_ref()
            .is_some_and(|ticket| !ticket.may_begin())
        {
            return TaskStep::Blocked;
        }
        let Some(action) = self.job.actions.get(self.next_action).copied().flatten() else {
            return idle;
        };
        // Only the ranges of an UNMAP list run in parallel.
        let most = match action {
            ScsiAction::Unmap if self.progress > 0 => MAX_IN_FLIGHT,
            _ => 1,
        };
        if self.in_flight >= most {
            return TaskStep::InFlight;
        }
        match self.next_operation(unit, data, action) {
            Ok(_) if data.has_failed() => {
                self.fail(unit, Sense::WRITE_ERROR);
                idle
            }
            Ok(operation) => {
                self.in_flight += 1;
                TaskStep::Submit(operation)
            }
            Err(OutOfMemory) => {
                self.fail(unit, Sense::WRITE_ERROR);
                idle
            }
        }
    }

    /// The next operation of `action`. An action may need several.
    fn next_operation(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        action: ScsiAction,
    ) -> Result<Operation, OutOfMemory> {
        let per_block = unit.sectors_per_block();
        let block = unit.block_size() as usize;
        let BlockRange { lba, blocks } = self.job.range;
        let sector = lba * per_block;
        // A job's range has at most 2^32 - 1 sectors.
        let sectors = blocks * per_block as u32;
        self.next_action += 1;
        self.after_read = None;
        Ok(match action {
            ScsiAction::Flush => Operation::Flush,
            ScsiAction::Read(after) => {
                self.after_read = Some(after);
                Operation::Read { sector, sectors }
            }
            ScsiAction::Write { from } => {
                // `read` fills the whole buffer.
                let mut payload = Buffer::try_for_overwrite(blocks as usize * block)?;
                data.read(from, &mut payload);
                let data = payload;
                Operation::Write { sector, data }
            }
            ScsiAction::Fill => {
                let left = blocks as usize - self.progress;
                let most = unit.max_transfer_bytes().min(MAX_FILL_BYTES) / block;
                let part = left.min(most);
                let mut payload = Buffer::try_for_overwrite(part * block)?;
                data.read(0, &mut payload[..block]);
                let mut filled = block;
                while filled < payload.len() {
                    let more = filled.min(payload.len() - filled);
                    payload.copy_within(..more, filled);
                    filled += more;
                }
                let sector = sector + self.progress as u64 * per_block;
                self.progress = if part < left {
                    self.next_action -= 1;
                    self.progress + part
                } else {
                    0
                };
                let data = payload;
                Operation::Write { sector, data }
            }
            ScsiAction::Zero { unmap } => {
                let can = unit.can();
                if unmap && !can.write_zeroes {
                    Operation::Discard { sector, sectors }
                } else {
                    Operation::WriteZeroes {
                        sector,
                        sectors,
                        unmap,
                    }
                }
            }
            ScsiAction::Unmap => {
                let range = self.job.list[self.progress];
                self.progress += 1;
                if self.progress < self.job.list.len() {
                    self.next_action -= 1;
                } else {
                    self.progress = 0;
                }
                Operation::Discard {
                    sector: range.lba * per_block,
                    sectors: range.blocks * per_block as u32,
                }
            }
        })
    }

    /// Takes the result of an operation of this task.
    pub fn complete(
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
        let checked = match (result, self.after_read) {
            (Ok(Some(blocks)), Some(after)) => self.use_blocks(unit, data, &blocks, after),
            (Ok(_), None) => Ok(()),
            // A read without its data is an error too.
            (Ok(None), Some(_)) => Err(Sense::READ_ERROR),
            (Err(failure), Some(_)) => Err(Sense::of(failure, Sense::READ_ERROR)),
            (Err(failure), None) => Err(Sense::of(failure, Sense::WRITE_ERROR)),
        };
        if let Err(sense) = checked {
            self.fail(unit, sense);
        }
    }

    fn fail(&mut self, unit: &LogicalUnit, sense: Sense) {
        let sense = sense.data(unit.descriptor_sense());
        self.failed = Some((Status::CheckCondition, Some(sense)));
        self.data_in = None;
    }

    /// Handles the blocks that were read.
    fn use_blocks(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        blocks: &[u8],
        after: AfterRead,
    ) -> Result<(), Sense> {
        let block = unit.block_size() as usize;
        if blocks.len() != self.job.range.blocks as usize * block {
            return Err(Sense::READ_ERROR);
        }
        match after {
            AfterRead::Forget => Ok(()),
            AfterRead::Return => {
                let len = blocks.len().min(data.len());
                data.write(0, &blocks[..len]);
                self.data_in = Some(len);
                Ok(())
            }
            AfterRead::Compare => compare(blocks, data, blocks.len()),
            AfterRead::CompareEach => compare(blocks, data, block),
        }
    }

    /// Aborts the command: it submits no more operations, and ends with TASK ABORTED once none is
    /// in flight. Operations already submitted are not undone.
    pub fn abort(&mut self) {
        self.failed = Some((Status::TaskAborted, None));
        self.data_in = None;
    }

    /// The result of the command, after [`TaskStep::Done`].
    pub fn outcome(self) -> TaskOutcome {
        let (status, sense) = self.failed.unwrap_or((Status::Good, None));
        TaskOutcome {
            status,
            sense,
            data_in: self.data_in,
        }
    }
}

/// Compares blocks with the first `period` bytes of the data buffer, repeated as often as needed.
fn compare(blocks: &[u8], data: &dyn DataBuffer, period: usize) -> Result<(), Sense> {
    let mut chunk = [0; COMPARE_BYTES];
    // Each block size divides `COMPARE_BYTES`, or is a multiple of it.
    for (index, blocks) in blocks.chunks(COMPARE_BYTES.min(period)).enumerate() {
        let offset = index * COMPARE_BYTES.min(period) % period;
        let expected = &mut chunk[..blocks.len()];
        data.read(offset, expected);
        if let Some(at) = blocks
            .iter()
            .zip(&*expected)
            .position(|(found, expected)| found != expected)
        {
            return Err(Sense::miscompare((offset + at) as u64));
        }
    }
    Ok(())
}

const _: () = assert!(
    COMPARE_BYTES.is_multiple_of(SECTOR_SIZE as usize) && MAX_FILL_BYTES.is_multiple_of(4096)
);
