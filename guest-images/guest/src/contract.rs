//! The contract between the VMM and the guest. Both are compiled with it.
//!
//! 1. [`BootInfo`]: a few words in guest memory, whose address is the argument of the guest's
//!    entry.
//! 2. [`GuestMessage`]: the guest's reports over the serial console. Lines that begin with `@` are for the
//!    VMM: for each transport one `@begin` and one `@end` (`@loaded` after a load), or a `@fail`,
//!    then `@off`. All other lines are for the user. The VMM measures the time from the end of a
//!    `@begin` line to the first byte of the next line, so console output is not part of the
//!    measured job.
//! 3. [`Digest`]: what the disk must hold after the guest has ended.

use core::fmt;
use core::str::FromStr;

/// The first word of a [`BootInfo`]: "WALVGST1" in little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"WALVGST1");

/// Number of 64-bit words of a [`BootInfo`] in guest memory.
pub const WORDS: usize = 12;

/// Most slots for virtio-mmio devices.
pub const MMIO_SLOTS: usize = 16;

/// Addresses in the guest's physical address space, and the guest's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootInfo {
    /// End of the RAM that begins at 0: the first address after it.
    pub memory_end: u64,
    /// Address of the interrupt descriptor table: 256 empty gates for the guest to fill in.
    pub idt: u64,
    /// Address of the first virtio-mmio register block; the others follow at every 4 KiB.
    pub mmio_base: u64,
    /// The interrupt line (GSI) of each slot, from the first on; 0 if there is no such slot.
    pub mmio_lines: [u8; MMIO_SLOTS],
    /// Address of the PCI configuration space (ECAM) of bus 0.
    pub ecam: u64,
    /// I/O port that powers the virtual machine off.
    pub off_port: u16,
    /// The 16-bit value that powers it off.
    pub off_value: u16,
    /// I/O port that resets the virtual machine, with which the guest ends after a failure.
    pub reset_port: u16,
    /// The byte that resets it.
    pub reset_value: u8,
    /// The guest's task.
    pub task: Task,
}

/// The guest's task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// A counted job, with every byte compared: one `@begin` and one `@end` for each transport.
    #[default]
    Job,
    /// Cases of what a device must do, and must withstand: for each transport one `@case` per case,
    /// then a `@checked`.
    Conformance,
    /// A load on one transport: one `@begin` and one `@loaded`.
    Load(Load),
}

/// Closed loops over random 4 KiB blocks of the whole disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The load uses virtio-pci; otherwise virtio-mmio.
    pub pci: bool,
    /// The operation that each loop repeats.
    pub kind: LoadKind,
    /// Requests in flight in each queue, 1 to 32.
    pub iodepth: u8,
    /// Queues in use, 1 to 4.
    pub queues: u8,
    /// Ticks of the time stamp counter after which no new request begins.
    pub ticks: u64,
    /// Number of reads and writes after which no new one begins.
    pub requests: u64,
}

/// The operation that each closed loop of a load repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// Reads.
    RandRead,
    /// Writes.
    RandWrite,
    /// Writes, each followed by a FLUSH once it has completed.
    RandWriteFlush,
}

impl LoadKind {
    const ALL: [Self; 3] = [Self::RandRead, Self::RandWrite, Self::RandWriteFlush];
}

impl Load {
    /// All fields except [`ticks`](Self::ticks) and [`requests`](Self::requests), in the bits above
    /// the task's number.
    fn to_word(self) -> u64 {
        u64::from(self.pci) << 32
            | (self.kind as u64) << 24
            | u64::from(self.iodepth) << 16
            | u64::from(self.queues) << 8
    }

    fn from_words(word: u64, ticks: u64, requests: u64) -> Option<Self> {
        let byte = |shift: u32| (word >> shift) as u8;
        Some(Self {
            pci: byte(32) != 0,
            kind: *LoadKind::ALL.get(usize::from(byte(24)))?,
            iodepth: byte(16),
            queues: byte(8),
            ticks,
            requests,
        })
    }
}

impl BootInfo {
    /// The words to write to guest memory, each little-endian.
    pub fn to_words(self) -> [u64; WORDS] {
        let lines = u128::from_le_bytes(self.mmio_lines);
        let (task, ticks, requests) = match self.task {
            Task::Job => (0, 0, 0),
            Task::Conformance => (1, 0, 0),
            Task::Load(load) => (load.to_word() | 2, load.ticks, load.requests),
        };
        [
            MAGIC,
            self.memory_end,
            self.idt,
            self.mmio_base,
            lines as u64,
            (lines >> 64) as u64,
            self.ecam,
            u64::from(self.off_port) << 16 | u64::from(self.off_value),
            u64::from(self.reset_port) << 8 | u64::from(self.reset_value),
            task,
            ticks,
            requests,
        ]
    }

    /// Reads the words back; `None` if they do not begin with [`MAGIC`].
    pub fn from_words(words: [u64; WORDS]) -> Option<Self> {
        let [
            magic,
            memory_end,
            idt,
            mmio_base,
            low,
            high,
            ecam,
            off,
            reset,
            task,
            ticks,
            requests,
        ] = words;
        let task = match task as u8 {
            0 => Task::Job,
            1 => Task::Conformance,
            2 => Task::Load(Load::from_words(task, ticks, requests)?),
            _ => return None,
        };
        (magic == MAGIC).then_some(Self {
            memory_end,
            idt,
            mmio_base,
            mmio_lines: (u128::from(low) | u128::from(high) << 64).to_le_bytes(),
            ecam,
            off_port: (off >> 16) as u16,
            off_value: off as u16,
            reset_port: (reset >> 8) as u16,
            reset_value: reset as u8,
            task,
        })
    }
}

/// Counts of the guest's driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that have completed.
    pub requests: u64,
    /// Doorbells written.
    pub doorbells: u64,
    /// Interrupts received.
    pub interrupts: u64,
    /// FLUSH requests that have completed.
    pub flushes: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl Counts {
    /// Reads the counts from the numbers of a line.
    fn read(next: &mut impl FnMut() -> Option<u64>) -> Option<Self> {
        Some(Self {
            requests: next()?,
            doorbells: next()?,
            interrupts: next()?,
            flushes: next()?,
            bytes: next()?,
        })
    }
}

/// The result of a transport's job, as the guest saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The driver's counts.
    pub counts: Counts,
    /// Blocks from the start of the disk that were read and compared at the end.
    pub blocks: u32,
    /// The digest of those blocks.
    pub digest: Digest,
}

/// The result of a load, as the guest saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadResult {
    /// The driver's counts.
    pub counts: Counts,
    /// Duration of the load in ticks of the time stamp counter.
    pub ticks: u64,
    /// Median duration of a loop's round in ticks; a round with a FLUSH includes the FLUSH.
    pub p50: u64,
    /// The 99th percentile of the rounds, in ticks.
    pub p99: u64,
    /// The 99.9th percentile of the rounds, in ticks.
    pub p999: u64,
    /// Whether the device's write cache was on, according to its configuration space.
    pub write_cache: bool,
}

/// A line for the VMM. The transport and the reason are of type `T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestMessage<T> {
    /// The job of this transport begins.
    Begin(T),
    /// The job of this transport has ended, with every byte verified.
    End(T, Outcome),
    /// The load on this transport has ended.
    Loaded(T, LoadResult),
    /// The task on this transport has failed, for the reason given.
    Fail(T, T),
    /// A case of this name ran on this transport. The third field is the problem, if the case
    /// failed.
    Case(T, T, Option<T>),
    /// This many cases ran on this transport: all of them.
    Checked(T, u32),
    /// The guest powers off.
    Off,
}

impl<T: fmt::Display> fmt::Display for GuestMessage<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin(transport) => write!(f, "@begin {transport}"),
            Self::End(
                transport,
                Outcome {
                    counts,
                    blocks,
                    digest,
                },
            ) => write!(
                f,
                "@end {transport} {} {} {} {} {} {blocks} {}",
                counts.requests,
                counts.doorbells,
                counts.interrupts,
                counts.flushes,
                counts.bytes,
                digest.0
            ),
            Self::Loaded(transport, loaded) => write!(
                f,
                "@loaded {transport} {} {} {} {} {} {} {} {} {} {}",
                loaded.counts.requests,
                loaded.counts.doorbells,
                loaded.counts.interrupts,
                loaded.counts.flushes,
                loaded.counts.bytes,
                loaded.ticks,
                loaded.p50,
                loaded.p99,
                loaded.p999,
                u8::from(loaded.write_cache)
            ),
            Self::Fail(transport, reason) => write!(f, "@fail {transport} {reason}"),
            Self::Case(transport, case, None) => write!(f, "@case {transport} {case}"),
            Self::Case(transport, case, Some(why)) => write!(f, "@case {transport} {case} {why}"),
            Self::Checked(transport, cases) => write!(f, "@checked {transport} {cases}"),
            Self::Off => write!(f, "@off"),
        }
    }
}

impl<'a> GuestMessage<&'a str> {
    /// Parses a line without its line end. Returns `None` if the line is not for the VMM.
    pub fn parse(line: &'a str) -> Option<Self> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "@begin" => Some(Self::Begin(rest)),
            "@fail" => rest
                .split_once(' ')
                .map(|(transport, why)| Self::Fail(transport, why)),
            "@case" => {
                let (transport, rest) = rest.split_once(' ')?;
                let (case, why) = match rest.split_once(' ') {
                    Some((case, why)) => (case, Some(why)),
                    None => (rest, None),
                };
                Some(Self::Case(transport, case, why))
            }
            "@checked" => {
                let (transport, cases) = rest.split_once(' ')?;
                Some(Self::Checked(transport, cases.parse().ok()?))
            }
            "@end" => {
                let (transport, numbers) = rest.split_once(' ')?;
                let mut numbers = numbers.split(' ').map(u64::from_str);
                let mut next = || numbers.next()?.ok();
                let counts = Counts::read(&mut next)?;
                let blocks = u32::try_from(next()?).ok()?;
                Some(Self::End(
                    transport,
                    Outcome {
                        counts,
                        blocks,
                        digest: Digest(next()?),
                    },
                ))
            }
            "@loaded" => {
                let (transport, numbers) = rest.split_once(' ')?;
                let mut numbers = numbers.split(' ').map(u64::from_str);
                let mut next = || numbers.next()?.ok();
                let loaded = LoadResult {
                    counts: Counts::read(&mut next)?,
                    ticks: next()?,
                    p50: next()?,
                    p99: next()?,
                    p999: next()?,
                    write_cache: next()? != 0,
                };
                Some(Self::Loaded(transport, loaded))
            }
            "@off" => Some(Self::Off),
            _ => None,
        }
    }
}

/// A digest of a disk's content that does not depend on the order of the blocks. The guest computes
/// it from the expected content, the VMM from the disk's content after the guest has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Digest {
    /// Adds a block.
    pub fn add(&mut self, block: u32, data: &[u8]) {
        let mut sum = mix(u64::from(block));
        for word in data.as_chunks::<8>().0 {
            sum = mix(sum ^ u64::from_le_bytes(*word));
        }
        self.0 = self.0.wrapping_add(sum);
    }
}

/// The finalizer of SplitMix64: every input bit changes half of the output bits.
pub fn mix(mut word: u64) -> u64 {
    word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip_and_foreign_words_are_refused() {
        let info = BootInfo {
            memory_end: 1 << 26,
            idt: 0x2000,
            mmio_base: 0xd000_0000,
            mmio_lines: [5, 6, 7, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 22, 23],
            ecam: 0xe000_0000,
            off_port: 0x604,
            off_value: 0x3400,
            reset_port: 0x64,
            reset_value: 0xfe,
            task: Task::Conformance,
        };
        let mut words = info.to_words();
        assert_eq!(BootInfo::from_words(words), Some(info));
        for kind in LoadKind::ALL {
            let load = Load {
                pci: kind != LoadKind::RandRead,
                kind,
                iodepth: 32,
                queues: 4,
                ticks: u64::MAX,
                requests: 1 << 40,
            };
            let task = Task::Load(load);
            let info = BootInfo { task, ..info };
            assert_eq!(BootInfo::from_words(info.to_words()), Some(info));
        }
        words[9] = 3 << 24 | 2;
        assert_eq!(BootInfo::from_words(words), None, "no such kind of load");
        words[9] = 3;
        assert_eq!(BootInfo::from_words(words), None, "no such task");
        words[9] = 1;
        words[0] ^= 1;
        assert_eq!(BootInfo::from_words(words), None);
    }

    #[test]
    fn lines_round_trip() {
        let counts = Counts {
            requests: 1,
            doorbells: 2,
            interrupts: 3,
            flushes: 4,
            bytes: u64::MAX,
        };
        let outcome = Outcome {
            counts,
            blocks: 6,
            digest: Digest(7),
        };
        for line in [
            GuestMessage::Begin("mmio"),
            GuestMessage::End("pci", outcome),
            GuestMessage::Loaded(
                "pci",
                LoadResult {
                    counts,
                    ticks: 8,
                    p50: 9,
                    p99: 10,
                    p999: 11,
                    write_cache: true,
                },
            ),
            GuestMessage::Fail("mmio", "block 1, byte 2: expected 0x03, read 0x04"),
            GuestMessage::Case("mmio", "flush", None),
            GuestMessage::Case("pci", "chain-loop", Some("no reset is asked for")),
            GuestMessage::Checked("pci", 40),
            GuestMessage::Off,
        ] {
            assert_eq!(GuestMessage::parse(&line.to_string()), Some(line));
        }
    }

    #[test]
    fn other_lines_are_not_for_the_vmm() {
        for text in [
            "",
            "mmio: found",
            "@",
            "@end",
            "@end mmio 1 2",
            "@end mmio a b c d e f g",
            "@loaded pci 1 2 3 4 5 6 7 8 9",
            "@fail",
            "@case mmio",
            "@checked mmio",
            "@checked mmio x",
        ] {
            assert_eq!(GuestMessage::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_digest_sees_swapped_blocks() {
        let (first, second) = ([1u8; 4096], [2u8; 4096]);
        let digest = |blocks: [(u32, &[u8]); 2]| {
            let mut digest = Digest::default();
            blocks
                .into_iter()
                .for_each(|(block, data)| digest.add(block, data));
            digest
        };
        assert_eq!(
            digest([(0, &first), (1, &second)]),
            digest([(1, &second), (0, &first)])
        );
        assert_ne!(
            digest([(0, &first), (1, &second)]),
            digest([(1, &first), (0, &second)])
        );
    }
}
