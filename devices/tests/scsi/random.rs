//! Random commands of valid form, compared with a plain vector of bytes.

use proptest::prelude::*;
use walvisor_devices::scsi::Status;

use crate::driver::*;

const BLOCKS: u64 = 96;

/// A command: kind, address, number of blocks, seed of its data, and spare bits.
#[derive(Clone, Debug)]
struct Command {
    kind: u8,
    lba: u64,
    blocks: u32,
    seed: u64,
    bits: u8,
}

fn command() -> impl Strategy<Value = Command> {
    (0..12_u8, 0..BLOCKS + 2, 0..20_u32, 0..4_u64, any::<u8>()).prop_map(
        |(kind, lba, blocks, seed, bits)| Command {
            kind,
            lba,
            blocks,
            seed,
            bits,
        },
    )
}

/// The model of a disk: its bytes.
struct Model {
    bytes: Vec<u8>,
    block: usize,
}

impl Model {
    fn range(&mut self, lba: u64, blocks: u32) -> Option<&mut [u8]> {
        let end = lba + u64::from(blocks);
        let bytes = |block: u64| block as usize * self.block;
        (end <= BLOCKS)
            .then(|| bytes(lba)..bytes(end))
            .map(|range| &mut self.bytes[range])
    }
}

/// Data with repeated blocks, so that comparisons succeed and runs of zeroes occur.
fn blocks(seed: u64, lba: u64, blocks: u32, block: usize) -> Vec<u8> {
    let one = |at: u64| match seed {
        0 => vec![0; block],
        seed => pattern(seed + at % 2, block),
    };
    (0..u64::from(blocks))
        .flat_map(|at| one(lba + at))
        .collect()
}

/// Runs a command on the disk and on the model. Both have to end in the same way.
fn step(bench: &mut Bench, model: &mut Model, command: &Command) {
    let Command {
        kind,
        lba,
        blocks: count,
        seed,
        bits,
    } = *command;
    let size = model.block;
    let data = blocks(seed, lba, count, size);
    let flags = bits & 0x18;
    // One of the CDB lengths that can express the command.
    let pick = |ten: u8, twelve: Option<u8>, sixteen: u8, flags: u8| match (bits & 3, twelve) {
        (0, _) => cdb10(ten, flags, lba as u32, count as u16).to_vec(),
        (1, Some(twelve)) => cdb12(twelve, flags, lba as u32, count).to_vec(),
        _ => cdb16(sixteen, flags, lba, count).to_vec(),
    };
    // The result in the model: the data read, or a failure and the offset of the first difference
    // if any.
    let differs = |is: &[u8], should: &[u8]| is.iter().zip(should).position(|(a, b)| a != b);
    let (cdb, send, expected): (_, _, Result<Vec<u8>, Option<usize>>) = match kind {
        0..3 => {
            let expected = model
                .range(lba, count)
                .ok_or(None)
                .map(|range| range.to_vec());
            (
                pick(0x28, Some(0xa8), 0x88, flags),
                vec![0xee; data.len()],
                expected,
            )
        }
        3..6 => {
            let range = model
                .range(lba, count)
                .map(|range| range.copy_from_slice(&data));
            let expected = range.map(|()| Vec::new()).ok_or(None);
            // A disk with a log writes atomically too.
            let cdb = if bits & 4 != 0 && bench.unit.backend().max_atomic_bytes() > 0 {
                write_atomic(flags, lba, count as u16).to_vec()
            } else {
                pick(0x2a, Some(0xaa), 0x8a, flags)
            };
            (cdb, data, expected)
        }
        6 => {
            let range = model
                .range(lba, count)
                .map(|range| range.copy_from_slice(&data));
            let expected = range.map(|()| Vec::new()).ok_or(None);
            let check = 2 * (bits >> 7);
            (pick(0x2e, Some(0xae), 0x8e, check), data, expected)
        }
        7 => {
            let zero = bits & 0x80 != 0;
            let one = if zero {
                vec![0; size]
            } else {
                pattern(seed + 1, size)
            };
            let expected = match (count, model.range(lba, count)) {
                (1.., Some(range)) => {
                    range.copy_from_slice(&one.repeat(count as usize));
                    Ok(Vec::new())
                }
                _ => Err(None),
            };
            (pick(0x41, None, 0x93, flags & 8), one, expected)
        }
        8 => {
            let expected = model.range(lba, count).map(|range| range.fill(0));
            let list = unmap_list(&[(lba, count), (0, 0)]);
            let cdb = cdb10(0x42, 0, 0, list.len() as u16).to_vec();
            (cdb, list, expected.map(|()| Vec::new()).ok_or(None))
        }
        9 => {
            let new = blocks(seed + 1, lba, count, size);
            let expected = match model.range(lba, count) {
                Some(range) => match differs(range, &data) {
                    None => {
                        range.copy_from_slice(&new);
                        Ok(Vec::new())
                    }
                    at => Err(at),
                },
                None => Err(None),
            };
            let cdb = compare_and_write(flags, lba, count as u8).to_vec();
            (cdb, [data, new].concat(), expected)
        }
        10 => {
            // Nothing is compared, or all bytes are, or each block with one.
            let check = if count == 0 { 2 } else { bits >> 3 & 6 };
            let (check, sent) = match check {
                0 => (0, 0),
                6 => (6, size),
                _ => (2, data.len()),
            };
            let found = model.range(lba, count).map(|range| match check {
                6 => range.chunks(size).find_map(|one| differs(one, &data)),
                _ => differs(range, &data[..sent]),
            });
            let expected = match found {
                Some(at) => at.map_or(Ok(Vec::new()), |at| Err(Some(at))),
                None => Err(None),
            };
            let sent = data[..sent].to_vec();
            (pick(0x2f, Some(0xaf), 0x8f, check), sent, expected)
        }
        _ => {
            let expected = model.range(lba, count).map(|_| Vec::new()).ok_or(None);
            (pick(0x35, None, 0x91, bits & 2), Vec::new(), expected)
        }
    };
    let buffer = Data::new(send);
    let outcome = bench.run(&cdb, &buffer);
    match expected {
        Ok(bytes) => {
            assert_eq!(outcome.status, Status::Good, "{cdb:02x?}: {outcome:?}");
            let data_in = (kind < 3).then_some(bytes.len());
            assert_eq!(outcome.data_in, data_in, "{cdb:02x?}");
            assert_eq!(buffer.bytes()[..bytes.len()], bytes, "{cdb:02x?}");
        }
        Err(Some(at)) => {
            let refused = fixed(&outcome);
            assert_eq!(refused.code, MISCOMPARE, "{cdb:02x?}");
            assert_eq!(refused.information, Some(at as u32), "{cdb:02x?}");
        }
        Err(None) => {
            let refused = fixed(&outcome);
            let empty = kind == 7 && count == 0 && lba <= BLOCKS;
            let expected = if empty { INVALID_CDB } else { OUT_OF_RANGE };
            assert_eq!(refused.code, expected, "{cdb:02x?}");
        }
    }
}

fn play(mut bench: Bench, commands: &[Command]) {
    let block = bench.unit.block_size() as usize;
    let mut model = Model {
        bytes: vec![0; BLOCKS as usize * block],
        block,
    };
    for command in commands {
        step(&mut bench, &mut model, command);
    }
    // In pieces that a disk with a log takes in one request.
    let parts = (0..BLOCKS).step_by(32).flat_map(|lba| bench.read(lba, 32));
    assert!(parts.eq(model.bytes));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn a_disk_is_bytes(
        commands in prop::collection::vec(command(), 1..60),
        block in prop::sample::select(vec![512_u32, 4096]),
    ) {
        play(Bench::ram(BLOCKS * u64::from(block), block), &commands);
    }
}

proptest! {
    // Few cases, because each creates a log.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn a_disk_with_a_log_is_bytes(
        commands in prop::collection::vec(command(), 1..200),
        block in prop::sample::select(vec![512_u32, 4096]),
    ) {
        play(Bench::wal(BLOCKS * u64::from(block), block), &commands);
    }
}
