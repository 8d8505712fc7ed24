//! A command in flight: its backend operations and its result.

use std::io;

use super::command;
use super::data::DataBuffer;
use super::job::{AfterRead, BlockAccess, BlockRange, CommandWork, ScsiAction};
use super::order::OrderTicket;
use super::plan::CommandPlan;
use super::provisioning::{DESCRIPTOR, lba_status_data};
use super::sense::{Sense, SenseData, Status};
use super::unit::LogicalUnit;
use crate::backend::{Buffer, Extent, Failure, Operation, OutOfMemory, SECTOR_SIZE};
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
    /// Look these extents of the disk up (see [`Mapped::extents`](crate::backend::Mapped::extents)),
    /// pass them to [`Task::complete_look_up`], and then call [`Task::next`] again. The look-up may
    /// take as long as the file system of the disk likes, so a thread that others wait for leaves
    /// it to another one.
    LookUp {
        /// The first sector.
        sector: u64,
        /// How many sectors follow: those up to the end of the disk.
        sectors: u64,
        /// The most extents, 1 to 256.
        most: usize,
    },
    /// Wait until an operation or a look-up of this task has ended.
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

/// A read of some of a command's blocks.
#[derive(Clone, Copy)]
struct ReadPart {
    /// What to do with them.
    after: AfterRead,
    /// Byte offset of the first in the range.
    from: usize,
    bytes: usize,
}

/// A command in flight.
pub struct Task {
    job: CommandWork,
    /// Index of the next action.
    next_action: usize,
    /// Blocks of the range read or filled, or ranges of the list discarded, including those in
    /// flight.
    progress: usize,
    in_flight: usize,
    /// The read in flight.
    reading: Option<ReadPart>,
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
                let len = return_data(&bytes, allocation, data);
                (CommandWork::without_actions(), Some(len), None)
            }
            Err(sense) => {
                let data = sense.data(unit.descriptor_sense());
                let failed = (Status::CheckCondition, Some(data));
                (CommandWork::without_actions(), None, Some(failed))
            }
        };
        Self {
            job,
            next_action: 0,
            progress: 0,
            in_flight: 0,
            reading: None,
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
                ScsiAction::LookUp { most, .. } => most * (size_of::<Extent>() + DESCRIPTOR),
                ScsiAction::Flush | ScsiAction::Zero { .. } | ScsiAction::Unmap => 0,
            });
        most.max().unwrap_or(0)
    }

    /// What the transport has to do next.
    pub fn next(&mut self, unit: &LogicalUnit, data: &dyn DataBuffer) -> TaskStep {
        self.next_part(unit, data, usize::MAX)
    }

    /// As [`next`](Self::next), but reads at most so many bytes at a time, or a block.
    pub(crate) fn next_part(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        most_read: usize,
    ) -> TaskStep {
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
        match self.next_step(unit, data, action, most_read) {
            Ok(_) if data.has_failed() => {
                self.fail(unit, Sense::WRITE_ERROR);
                idle
            }
            Ok(step) => {
                self.in_flight += 1;
                step
            }
            Err(OutOfMemory) => {
                self.fail(unit, Sense::WRITE_ERROR);
                idle
            }
        }
    }

    /// Of the read that was submitted last, the bytes that the disk's limits count: those of all
    /// parts for the first one. `None`: it is another part, which they do not count.
    pub(crate) fn counted_read(&self, unit: &LogicalUnit) -> Option<u64> {
        let first = self.reading.is_some_and(|part| part.from == 0);
        first.then(|| u64::from(self.job.range.blocks) * u64::from(unit.block_size()))
    }

    /// The next operation, or the look-up, of `action`. An action may need several.
    fn next_step(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        action: ScsiAction,
        most_read: usize,
    ) -> Result<TaskStep, OutOfMemory> {
        let per_block = unit.sectors_per_block();
        let block = unit.block_size() as usize;
        let BlockRange { lba, blocks } = self.job.range;
        let sector = lba * per_block;
        // A job's range has at most 2^32 - 1 sectors.
        let sectors = blocks * per_block as u32;
        self.next_action += 1;
        self.reading = None;
        Ok(TaskStep::Submit(match action {
            ScsiAction::LookUp { most, .. } => {
                let sectors = unit.blocks().saturating_sub(lba) * per_block;
                return Ok(TaskStep::LookUp {
                    sector,
                    sectors,
                    most,
                });
            }
            ScsiAction::Flush => Operation::Flush,
            ScsiAction::Read(after) => {
                let left = blocks as usize - self.progress;
                let part = left.min((most_read / block).max(1));
                self.reading = Some(ReadPart {
                    after,
                    from: self.progress * block,
                    bytes: part * block,
                });
                let sector = sector + self.progress as u64 * per_block;
                let sectors = part as u32 * per_block as u32;
                self.go_on(part, left);
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
                self.go_on(part, left);
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
        }))
    }

    /// An operation does `part` of what is `left` of an action; the action goes on after it.
    fn go_on(&mut self, part: usize, left: usize) {
        self.progress = if part < left {
            self.next_action -= 1;
            self.progress + part
        } else {
            0
        };
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
        let checked = match (result, self.reading) {
            (Ok(Some(blocks)), Some(part)) => self.use_blocks(unit, data, &blocks, part),
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

    /// Takes the result of the look-up of this task.
    pub fn complete_look_up(
        &mut self,
        unit: &LogicalUnit,
        data: &dyn DataBuffer,
        found: io::Result<Vec<Extent>>,
    ) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let action = self.next_action.checked_sub(1);
        let action = action.and_then(|at| self.job.actions.get(at).copied().flatten());
        let Some(ScsiAction::LookUp { most, allocation }) = action else {
            debug_assert!(false, "the task looks nothing up");
            return;
        };
        if self.failed.is_some() {
            return;
        }
        match found {
            Ok(extents) => {
                let (per_block, start) = (unit.sectors_per_block(), self.job.range.lba);
                let bytes = lba_status_data(&extents, per_block, start, most);
                self.data_in = Some(return_data(&bytes, allocation, data));
            }
            Err(error) => {
                tracing::error!("cannot tell which parts of a disk hold data: {error}");
                self.fail(unit, Sense::READ_ERROR);
            }
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
        part: ReadPart,
    ) -> Result<(), Sense> {
        let block = unit.block_size() as usize;
        if blocks.len() != part.bytes {
            return Err(Sense::READ_ERROR);
        }
        match part.after {
            AfterRead::Forget => Ok(()),
            AfterRead::Return => {
                let len = blocks.len().min(data.len().saturating_sub(part.from));
                data.write(part.from, &blocks[..len]);
                self.data_in = Some(part.from + len);
                Ok(())
            }
            AfterRead::Compare => compare(blocks, data, part.from, blocks.len()),
            AfterRead::CompareEach => compare(blocks, data, 0, block),
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

/// Copies parameter data to the Data-In Buffer, as much as the allocation length and the buffer have
/// room for, and returns how much that is.
fn return_data(bytes: &[u8], allocation: usize, data: &dyn DataBuffer) -> usize {
    let len = bytes.len().min(allocation).min(data.len());
    data.write(0, &bytes[..len]);
    len
}

/// Compares blocks with `period` bytes of the data buffer, at offset `from`, repeated as often as
/// needed.
fn compare(blocks: &[u8], data: &dyn DataBuffer, from: usize, period: usize) -> Result<(), Sense> {
    let mut chunk = [0; COMPARE_BYTES];
    // Each block size divides `COMPARE_BYTES`, or is a multiple of it.
    for (index, blocks) in blocks.chunks(COMPARE_BYTES.min(period)).enumerate() {
        let offset = from + index * COMPARE_BYTES.min(period) % period;
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::*;
    use crate::backend::ram::RamDisk;

    struct Data(RefCell<Vec<u8>>);

    impl DataBuffer for Data {
        fn len(&self) -> usize {
            self.0.borrow().len()
        }

        fn read(&self, offset: usize, into: &mut [u8]) {
            into.copy_from_slice(&self.0.borrow()[offset..offset + into.len()]);
        }

        fn write(&self, offset: usize, from: &[u8]) {
            self.0.borrow_mut()[offset..offset + from.len()].copy_from_slice(from);
        }
    }

    /// Ends a command whose reads have at most `most` bytes. Returns its data, its outcome, and
    /// what the limits count of each of its reads.
    fn run(
        unit: &LogicalUnit,
        cdb: &[u8],
        data: Vec<u8>,
        most: usize,
    ) -> (Vec<u8>, TaskOutcome, Vec<Option<u64>>) {
        let mut queue = unit.backend().open_queue().unwrap();
        let data = Data(RefCell::new(data));
        let mut task = Task::new(unit, cdb, &data);
        let mut counted = Vec::new();
        loop {
            match task.next_part(unit, &data, most) {
                TaskStep::Submit(operation) => {
                    if let Operation::Read { sectors, .. } = operation {
                        assert!(sectors as usize * 512 <= most.max(512));
                        counted.push(task.counted_read(unit));
                    }
                    queue.submit(1, operation);
                }
                TaskStep::InFlight => {
                    queue.kick();
                    let mut done = Vec::new();
                    queue.completions(&mut done);
                    let ended = done.into_iter();
                    ended.for_each(|end| task.complete(unit, &data, end.result));
                }
                TaskStep::Done => return (data.0.into_inner(), task.outcome(), counted),
                TaskStep::Blocked => panic!("it is alone"),
                TaskStep::LookUp { .. } => panic!("it asks for no extents"),
            }
        }
    }

    /// Reads, and the comparisons of VERIFY and COMPARE AND WRITE.
    #[test]
    fn commands_whose_reads_come_in_parts_do_the_same() {
        let unit = LogicalUnit::new(Arc::new(RamDisk::new(64)), "serial", 512).unwrap();
        let bytes: Vec<u8> = (0..20 * 512).map(|at: u32| (at / 7) as u8).collect();
        let write = [0x2a, 0, 0, 0, 0, 3, 0, 0, 20, 0];
        let written = run(&unit, &write, bytes.clone(), 512);
        assert_eq!(written.1.status, Status::Good);
        let mut other = bytes.clone();
        other[11 * 512 + 77] ^= 1;
        for (most, parts) in [(usize::MAX, 1), (3 * 512 + 1, 7), (512, 20), (1, 20)] {
            let read = [0x28, 0, 0, 0, 0, 3, 0, 0, 20, 0];
            let (data, outcome, counted) = run(&unit, &read, vec![0; 20 * 512 - 5], most);
            assert!(data == bytes[..20 * 512 - 5]);
            assert_eq!(outcome.data_in, Some(20 * 512 - 5));
            let mut expected = vec![None; parts];
            expected[0] = Some(20 * 512);
            assert_eq!(counted, expected);
            let verify = [0x2f, 2, 0, 0, 0, 3, 0, 0, 20, 0];
            let (_, outcome, counted) = run(&unit, &verify, bytes.clone(), most);
            assert_eq!((outcome.status, counted), (Status::Good, expected));
            let swap = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 20, 0, 0];
            let both = [&other[..], &bytes[..]].concat();
            for (compares, data) in [(&verify[..], other.clone()), (&swap[..], both)] {
                let sense = run(&unit, compares, data, most).1.sense.unwrap();
                // MISCOMPARE, and at which byte.
                assert_eq!(sense[2] & 0xf, 0xe);
                assert_eq!(sense[3..7], (11 * 512 + 77_u32).to_be_bytes());
            }
            let both = [&bytes[..], &bytes[..]].concat();
            assert_eq!(run(&unit, &swap, both, most).1.status, Status::Good);
        }
    }
}
