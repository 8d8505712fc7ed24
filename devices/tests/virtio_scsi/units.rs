//! The units of a target: their numbers, their owners, and what they do to each other.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::BlockConfig;
use walvisor_devices::throttle::Limits;
use walvisor_devices::virtio_scsi::{MAX_UNITS, VirtioScsi};

use crate::driver::*;
use crate::gate::Gate;

on_both_transports!(
    the_configuration_says_what_the_target_takes,
    units_have_the_numbers_of_the_disks,
    a_new_capacity_is_an_event_and_a_unit_attention,
    events_wait_for_buffers,
    without_change_there_are_no_events,
    a_paused_unit_holds_up_no_other,
    a_paused_unit_with_many_commands_holds_up_no_other,
    a_limited_unit_holds_up_no_other,
    a_look_up_of_extents_holds_up_no_other_command,
    exclusive_commands_wait_across_queues,
    a_queue_that_stops_answers_what_a_pause_holds,
);

fn disks(count: u64) -> Vec<Arc<dyn Backend>> {
    let disk = |index| Arc::new(RamDisk::new(64 + index)) as _;
    (0..count).map(disk).collect()
}

fn the_configuration_says_what_the_target_takes(kind: Kind) {
    let mut driver = start(kind, disks(2), 2, EVERYTHING);
    let config: [u8; 36] = driver.read_config(0);
    let words: Vec<u32> = config
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    // num_queues, seg_max, max_sectors, cmd_per_lun, event_info_size, sense_size, cdb_size,
    // max_channel and max_target, max_lun.
    assert_eq!(words, [2, 62, 32768, 128, 16, 96, 32, 0, 16383]);
    let offered = driver.registers.device_features();
    // HOTPLUG and CHANGE, neither INOUT nor T10_PI.
    assert_eq!(offered & 0xf, 0b110);
}

fn units_have_the_numbers_of_the_disks(kind: Kind) {
    let mut driver = start(kind, disks(3), 1, EVERYTHING);
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let inquiry = [0x12, 0, 0, 0, 96, 0];
    let well_known = [0xc1, 1, 0, 0, 0, 0, 0, 0];
    for address in [lun(0), lun(2), lun(9), well_known] {
        let answer = driver.command(address, &report, &[], 256);
        assert_eq!((answer.verdict(), answer.residual), ((OK, 0), 256 - 32));
        assert_eq!(answer.data[..8], [0, 0, 0, 24, 0, 0, 0, 0]);
        let numbers: Vec<u8> = answer.data[8..32].chunks(8).map(|lun| lun[1]).collect();
        assert_eq!(numbers, [0, 1, 2]);
    }
    // Address, response, peripheral qualifier and type.
    let peripheral = |number| [1, 0, 0, number, 0, 0, 0, 0];
    for (address, response, first) in [
        (lun(2), OK, Some(0)),
        (peripheral(2), OK, Some(0)),
        (lun(3), OK, Some(0x7f)),
        (peripheral(3), OK, Some(0x7f)),
        ([1, 0, 0x41, 0, 0, 0, 0, 0], OK, Some(0x7f)),
        ([1, 0, 0x80, 0, 0, 0, 0, 0], OK, Some(0x7f)),
        ([1, 0, 0x01, 0, 0, 0, 0, 0], OK, Some(0x7f)),
        (well_known, OK, Some(0x7f)),
        ([1, 1, 0x40, 0, 0, 0, 0, 0], BAD_TARGET, None),
        ([0, 0, 0x40, 0, 0, 0, 0, 0], BAD_TARGET, None),
        ([1, 0, 0x40, 0, 0, 0, 0, 1], BAD_TARGET, None),
        ([0xff; 8], BAD_TARGET, None),
    ] {
        let answer = driver.command(address, &inquiry, &[], 96);
        assert_eq!(answer.verdict(), (response, 0), "{address:02x?}");
        let found = (answer.written > 108).then(|| answer.data[0]);
        assert_eq!(found, first, "{address:02x?}");
    }
    // LOGICAL UNIT NOT SUPPORTED.
    let answer = driver.command(lun(3), &read_10(0, 1), &[], 512);
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x25, 0]));
    let sense = driver.command(lun(3), &[3, 0, 0, 0, 18, 0], &[], 18);
    assert_eq!(
        (sense.verdict(), &sense.data[12..14]),
        ((OK, 0), &[0x25, 0][..])
    );
    let serial = driver.command(lun(1), &[0x12, 1, 0x80, 0, 64, 0], &[], 64);
    assert_eq!(serial.data[4..10], *b"unit 1");
}

/// The next event, of a buffer at `at`.
fn event(driver: &mut Driver, at: GuestAddress) -> (u32, Vec<u8>) {
    let (_, written) = driver.next_used(EVENTS);
    let mut bytes = vec![0; written as usize];
    driver.memory.read_slice(&mut bytes, at).unwrap();
    (written, bytes)
}

fn post_event_buffer(driver: &mut Driver, len: u32) -> GuestAddress {
    let at = driver.allocate(0x1000);
    driver.rings[EVENTS].add(&[Piece::writable(at, len)]);
    driver.kick(EVENTS);
    at
}

/// PARAM_CHANGE of a unit: CAPACITY DATA HAS CHANGED.
fn change_of(unit: u8) -> Vec<u8> {
    vec![3, 0, 0, 0, 1, 0, 0, unit, 0, 0, 0, 0, 0x2a, 9, 0, 0]
}

fn a_new_capacity_is_an_event_and_a_unit_attention(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let units: Vec<Arc<dyn Backend>> = vec![Arc::new(RamDisk::new(8)), Arc::new(gate.clone())];
    let mut driver = start(kind, units, 1, EVERYTHING);
    let at = post_event_buffer(&mut driver, 16);
    gate.set_sectors(32);
    driver.metrics[1].control.capacity_changed();
    assert_eq!(event(&mut driver, at), (16, change_of(1)));
    let answer = driver.command(lun(1), &cdb_10(0x25, 0, 0), &[], 8);
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x2a, 9]));
    let answer = driver.command(lun(1), &cdb_10(0x25, 0, 0), &[], 8);
    assert_eq!(answer.data[..4], 31_u32.to_be_bytes());
    assert_eq!(driver.command(lun(0), &[0; 6], &[], 0).verdict(), (OK, 0));
}

fn events_wait_for_buffers(kind: Kind) {
    let mut driver = start(kind, disks(3), 1, EVERYTHING);
    for unit in [2, 0, 2, 0] {
        driver.metrics[unit].control.capacity_changed();
    }
    // The target takes them in the order of their numbers, each once.
    for unit in [0, 2] {
        let at = post_event_buffer(&mut driver, 16);
        assert_eq!(event(&mut driver, at), (16, change_of(unit)));
    }
    // A buffer that is too short gets no event, and the event waits for the next.
    driver.metrics[1].control.capacity_changed();
    let at = post_event_buffer(&mut driver, 15);
    assert_eq!(event(&mut driver, at), (15, vec![0; 15]));
    let at = post_event_buffer(&mut driver, 64);
    assert_eq!(event(&mut driver, at), (16, change_of(1)));
    post_event_buffer(&mut driver, 16);
    clear_attentions(&mut driver);
    assert_eq!(driver.rings[EVENTS].used_index(), 4);
}

fn without_change_there_are_no_events(kind: Kind) {
    let mut driver = start(kind, disks(1), 1, 0);
    post_event_buffer(&mut driver, 16);
    driver.metrics[0].control.capacity_changed();
    let answer = driver.command(lun(0), &[0; 6], &[], 0);
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x2a, 9]));
    assert_eq!(driver.rings[EVENTS].used_index(), 0);
}

fn a_paused_unit_holds_up_no_other(kind: Kind) {
    let mut driver = start(kind, disks(2), 1, EVERYTHING);
    driver.metrics[0].control.pause().unwrap();
    let posted = driver.post_command(REQUESTS, lun(0), 5, &write_10(3, 1), &[7; 512], 0);
    for lba in 0..8 {
        write(&mut driver, 1, lba, &[9; 512]);
    }
    assert_eq!(driver.metrics[0].metrics.counts().writes, 0);
    driver.metrics[0].control.resume();
    let (head, written) = driver.next_used(REQUESTS);
    assert_eq!(head, posted.head);
    assert_eq!(driver.command_answer(&posted, written).verdict(), (OK, 0));
    assert_eq!(read(&mut driver, 0, 3, 512), [7; 512]);
}

/// More than a driver should have in flight.
fn a_paused_unit_with_many_commands_holds_up_no_other(kind: Kind) {
    let mut driver = start_sized(kind, disks(2), 1, 512, EVERYTHING);
    driver.metrics[0].control.pause().unwrap();
    let posted: Vec<_> = (0..200)
        .map(|id| driver.post_command(REQUESTS, lun(0), id, &[0; 6], &[], 0))
        .collect();
    driver.kick(REQUESTS);
    for lba in 0..8 {
        write(&mut driver, 1, lba, &[9; 512]);
    }
    driver.metrics[0].control.resume();
    for _ in &posted {
        let (head, written) = driver.next_used(REQUESTS);
        let command = posted.iter().find(|command| command.head == head).unwrap();
        assert_eq!(driver.command_answer(command, written).verdict(), (OK, 0));
    }
}

fn a_limited_unit_holds_up_no_other(kind: Kind) {
    let mut driver = start(kind, disks(2), 1, EVERYTHING);
    let limits = Limits {
        ops_per_second: 1,
        ops_burst: 1,
        ..driver.metrics[0].throttle.limits()
    };
    driver.metrics[0].throttle.set(limits);
    let posted: Vec<_> = (0..4)
        .map(|lba| driver.post_command(REQUESTS, lun(0), 5, &write_10(lba, 1), &[7; 512], 0))
        .collect();
    driver.kick(REQUESTS);
    let mut ended = 0;
    let other = driver.post_command(REQUESTS, lun(1), 6, &write_10(1, 1), &[9; 512], 0);
    driver.kick(REQUESTS);
    while driver.next_used(REQUESTS).0 != other.head {
        ended += 1;
    }
    assert!(ended < posted.len(), "the other unit's command came before");
    driver.metrics[0].throttle.set(Limits {
        ops_per_second: 0,
        ops_burst: 0,
        ..limits
    });
    for _ in ended..posted.len() {
        driver.next_used(REQUESTS);
    }
}

/// GET LBA STATUS from block 8 on.
const GET_LBA_STATUS: [u8; 16] = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 24, 0, 0];

/// As on a file system that does not answer.
fn a_look_up_of_extents_holds_up_no_other_command(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = start(
        kind,
        vec![Arc::new(gate.clone()), Arc::new(RamDisk::new(64))],
        1,
        EVERYTHING,
    );
    let release = gate.hold_up_look_up();
    let posted = driver.post_command(REQUESTS, lun(0), 5, &GET_LBA_STATUS, &[], 24);
    driver.kick(REQUESTS);
    wait_until("the look-up", || gate.look_ups() == 1);
    for lba in 0..8 {
        write(&mut driver, 1, lba, &[9; 512]);
        write(&mut driver, 0, lba, &[7; 512]);
    }
    release.send(()).unwrap();
    let (head, written) = driver.next_used(REQUESTS);
    assert_eq!(head, posted.head);
    let answer = driver.command_answer(&posted, written);
    assert_eq!((answer.verdict(), answer.residual), ((OK, 0), 0));
    // 20 bytes follow; 56 blocks from block 8 on are mapped.
    let expected = [[0, 0, 0, 20, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 8]].concat();
    assert_eq!(answer.data[..16], expected);
    assert_eq!(answer.data[16..24], [0, 0, 0, 56, 0, 0, 0, 0]);
    // One that panics is an error of its command: MEDIUM ERROR, UNRECOVERED READ ERROR. The next
    // waits for it.
    let panics = gate.hold_up_look_up();
    let posted = [(); 2].map(|()| {
        let posted = driver.post_command(REQUESTS, lun(0), 5, &GET_LBA_STATUS, &[], 24);
        driver.kick(REQUESTS);
        posted
    });
    wait_until("the look-up", || gate.look_ups() == 2);
    write(&mut driver, 0, 9, &[7; 512]);
    drop(panics);
    for (posted, verdict) in posted.iter().zip([(OK, CHECK), (OK, 0)]) {
        let (head, written) = driver.next_used(REQUESTS);
        let answer = driver.command_answer(posted, written);
        assert_eq!((head, answer.verdict()), (posted.head, verdict));
        if verdict.1 == CHECK {
            assert_eq!((answer.sense[2], answer.code()), (3, [0x11, 0]));
        }
    }
}

fn exclusive_commands_wait_across_queues(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    let mut driver = start(kind, vec![Arc::new(gate.clone())], 2, EVERYTHING);
    // COMPARE AND WRITE of block 3: zeroes become sevens.
    let swap = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0];
    let out = [[0; 512], [7; 512]].concat();
    let first = driver.post_command(REQUESTS, lun(0), 1, &swap, &out, 0);
    driver.kick(REQUESTS);
    wait_until("its read", || gate.submitted() == 1);
    let requests = driver.metrics[0].metrics.counts().requests;
    let second = driver.post_command(REQUESTS + 1, lun(0), 2, &write_10(3, 1), &[9; 512], 0);
    driver.kick(REQUESTS + 1);
    wait_until("the other command", || {
        driver.metrics[0].metrics.counts().requests > requests
    });
    assert_eq!(gate.submitted(), 1, "it waits");
    gate.open();
    let (_, written) = driver.next_used(REQUESTS);
    assert_eq!(driver.command_answer(&first, written).verdict(), (OK, 0));
    let (_, written) = driver.next_used(REQUESTS + 1);
    assert_eq!(driver.command_answer(&second, written).verdict(), (OK, 0));
    assert_eq!(read(&mut driver, 0, 3, 512), [9; 512]);
}

fn a_queue_that_stops_answers_what_a_pause_holds(kind: Kind) {
    let mut driver = start(kind, disks(1), 1, EVERYTHING);
    let before = driver.metrics[0].metrics.counts().requests;
    driver.metrics[0].control.pause().unwrap();
    let posted = driver.post_command(REQUESTS, lun(0), 5, &write_10(3, 1), &[7; 512], 0);
    driver.kick(REQUESTS);
    let requests = |driver: &Driver| driver.metrics[0].metrics.counts().requests;
    wait_until("the command", || requests(&driver) > before);
    // Would wait for ever if the pause held the command.
    driver.registers.set_status(0);
    wait_until("the reset", || driver.registers.status() == 0);
    // BUSY.
    assert_eq!(driver.command_answer(&posted, 108).verdict(), (OK, 8));
    driver.metrics[0].control.resume();
    driver.initialise(EVERYTHING);
    let answer = driver.command(lun(0), &[0; 6], &[], 0);
    // BUS DEVICE RESET FUNCTION OCCURRED.
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x29, 3]));
    assert_eq!(read(&mut driver, 0, 3, 512), [0; 512]);
}

#[test]
fn a_target_takes_what_it_can_have() {
    let config = |block_size, queues| BlockConfig {
        block_size,
        queues,
        ..BlockConfig::default()
    };
    let disk = || Arc::new(RamDisk::new(64));
    let refused = VirtioScsi::new(disk(), config(512, 255)).err().unwrap();
    assert_eq!(
        refused.to_string(),
        "queues=255: a SCSI target has 1 to 254 request queues"
    );
    let mut target = VirtioScsi::new(disk(), config(512, 254)).unwrap();
    let refused = target.add_unit(disk(), &config(1024, 1)).err().unwrap();
    assert_eq!(refused.to_string(), "block-size=1024: give 512 or 4096");
    for number in 1..MAX_UNITS {
        let unit = target.add_unit(disk(), &config(4096, 1)).unwrap();
        assert_eq!(unit.number, number);
    }
    let refused = target.add_unit(disk(), &config(512, 1)).err().unwrap();
    assert_eq!(refused.to_string(), "a SCSI target has at most 16 disks");
}
