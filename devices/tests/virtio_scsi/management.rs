//! The control queue (virtio 1.2, 5.6.6.2).

use std::sync::Arc;

use vm_memory::Bytes;
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_both_transports!(
    functions_end_the_commands_that_they_mean,
    a_function_is_answered_after_its_commands,
    queries_find_commands_and_end_none,
    a_reset_is_a_unit_attention,
    functions_for_nobody_are_refused,
    a_disk_has_no_asynchronous_events,
    commands_still_in_the_ring_are_meant_too,
);

const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_ACA: u32 = 2;
const CLEAR_TASK_SET: u32 = 3;
const I_T_NEXUS_RESET: u32 = 4;
const LOGICAL_UNIT_RESET: u32 = 5;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

/// Two units that answer nothing until their gate opens.
fn held(kind: Kind, queues: u16) -> (Driver, [Gate; 2]) {
    let gates = [64, 64].map(|sectors| Gate::new(RamDisk::new(sectors)));
    let disks: Vec<Arc<dyn Backend>> = gates
        .iter()
        .map(|gate| Arc::new(gate.clone()) as _)
        .collect();
    (start(kind, disks, queues, EVERYTHING), gates)
}

/// Writes 1 and 2 to unit 0 in two queues, and 1 to unit 1, all in flight.
fn three_writes(driver: &mut Driver, gates: &[Gate; 2]) -> [PostedCommand; 3] {
    let places = [(REQUESTS, 0, 1), (REQUESTS + 1, 0, 2), (REQUESTS, 1, 1)];
    let posted = places.map(|(queue, unit, id)| {
        let posted = driver.post_command(queue, lun(unit), id, &write_10(1, 1), &[7; 512], 0);
        driver.kick(queue);
        posted
    });
    wait_until("3 writes", || {
        gates[0].submitted() + gates[1].submitted() == 3
    });
    posted
}

/// Waits until the functions so far have reached all queues: a query passes through them after
/// those, and waits for no command.
fn wait_for_functions(driver: &mut Driver) {
    assert_eq!(driver.manage(QUERY_TASK, lun(0), u64::MAX), OK);
}

fn functions_end_the_commands_that_they_mean(kind: Kind) {
    for (function, id, expected) in [
        (ABORT_TASK, 2, [OK, ABORTED, OK]),
        (ABORT_TASK, 9, [OK, OK, OK]),
        (ABORT_TASK_SET, 9, [ABORTED, ABORTED, OK]),
        (CLEAR_TASK_SET, 0, [ABORTED, ABORTED, OK]),
        (LOGICAL_UNIT_RESET, 0, [RESET, RESET, OK]),
        (I_T_NEXUS_RESET, 0, [RESET, RESET, RESET]),
        (CLEAR_ACA, 1, [OK, OK, OK]),
    ] {
        let (mut driver, gates) = held(kind, 2);
        let posted = three_writes(&mut driver, &gates);
        let response = driver.post_function(function, lun(0), id);
        let waits = expected != [OK; 3];
        if !waits {
            driver.next_used(CONTROL);
        }
        wait_for_functions(&mut driver);
        let answered: u8 = driver.memory.read_obj(response).unwrap();
        assert_eq!(answered, if waits { 0xee } else { OK }, "{function}");
        gates.iter().for_each(Gate::open);
        if waits {
            driver.next_used(CONTROL);
        }
        assert_eq!(driver.memory.read_obj::<u8>(response).unwrap(), OK);
        for queue in [REQUESTS, REQUESTS, REQUESTS + 1] {
            driver.next_used(queue);
        }
        let found = posted.map(|posted| driver.command_answer(&posted, 108).response);
        assert_eq!(found, expected, "function {function} for command {id}");
    }
}

fn a_function_is_answered_after_its_commands(kind: Kind) {
    let (mut driver, gates) = held(kind, 2);
    let posted = three_writes(&mut driver, &gates);
    driver.post_function(LOGICAL_UNIT_RESET, lun(0), 0);
    wait_for_functions(&mut driver);
    gates[0].open();
    driver.next_used(CONTROL);
    // Both are answered by now; the one of the other unit is not.
    let found = posted.map(|posted| driver.command_answer(&posted, 108).response);
    assert_eq!(found, [RESET, RESET, 0xee]);
    gates[1].open();
}

fn queries_find_commands_and_end_none(kind: Kind) {
    let (mut driver, gates) = held(kind, 2);
    let set = |driver: &mut Driver, unit| driver.manage(QUERY_TASK_SET, lun(unit), 0);
    assert_eq!(set(&mut driver, 0), OK);
    let posted = three_writes(&mut driver, &gates);
    assert_eq!(set(&mut driver, 0), FUNCTION_SUCCEEDED);
    assert_eq!(driver.manage(QUERY_TASK, lun(0), 2), FUNCTION_SUCCEEDED);
    assert_eq!(driver.manage(QUERY_TASK, lun(1), 2), OK);
    assert_eq!(driver.manage(QUERY_TASK, lun(0), 3), OK);
    gates.iter().for_each(Gate::open);
    for queue in [REQUESTS, REQUESTS, REQUESTS + 1] {
        driver.next_used(queue);
    }
    for posted in posted {
        assert_eq!(driver.command_answer(&posted, 108).verdict(), (OK, 0));
    }
}

fn a_reset_is_a_unit_attention(kind: Kind) {
    let (mut driver, _) = held(kind, 1);
    // START STOP UNIT: stop, without a flush.
    let stop = [0x1b, 0, 0, 0, 4, 0];
    assert_eq!(driver.command(lun(1), &stop, &[], 0).verdict(), (OK, 0));
    assert_eq!(driver.manage(LOGICAL_UNIT_RESET, lun(1), 0), OK);
    assert_eq!(driver.command(lun(0), &[0; 6], &[], 0).verdict(), (OK, 0));
    let answer = driver.command(lun(1), &[0; 6], &[], 0);
    // BUS DEVICE RESET FUNCTION OCCURRED, once. The unit is no longer stopped.
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x29, 3]));
    assert_eq!(driver.command(lun(1), &[0; 6], &[], 0).verdict(), (OK, 0));
}

fn functions_for_nobody_are_refused(kind: Kind) {
    let (mut driver, _) = held(kind, 1);
    let other_target = [1, 5, 0x40, 0, 0, 0, 0, 0];
    for (function, address, response) in [
        (LOGICAL_UNIT_RESET, lun(2), INCORRECT_LUN),
        (ABORT_TASK, lun(2), INCORRECT_LUN),
        (LOGICAL_UNIT_RESET, other_target, BAD_TARGET),
        (I_T_NEXUS_RESET, other_target, BAD_TARGET),
        (8, lun(0), FUNCTION_REJECTED),
        (u32::MAX, lun(0), FUNCTION_REJECTED),
    ] {
        let found = driver.manage(function, address, 0);
        assert_eq!(found, response, "function {function} for {address:02x?}");
    }
}

fn a_disk_has_no_asynchronous_events(kind: Kind) {
    let (mut driver, _) = held(kind, 1);
    for (request, address, expected) in [
        (1_u8, lun(0), OK),
        (2, lun(1), OK),
        (1, lun(2), INCORRECT_LUN),
        (2, [0; 8], BAD_TARGET),
    ] {
        let bytes = [&[request, 0, 0, 0], &address[..], &[0xff; 4]].concat();
        let response = driver.post_control(&bytes, 5);
        assert_eq!(driver.next_used(CONTROL).1, 5);
        let mut answer = [0; 5];
        driver.memory.read_slice(&mut answer, response).unwrap();
        assert_eq!(answer, [0, 0, 0, 0, expected]);
    }
    // A request that nobody knows is used, with nothing in it.
    driver.post_control(&[9, 0, 0, 0], 5);
    assert_eq!(driver.next_used(CONTROL).1, 0);
}

fn commands_still_in_the_ring_are_meant_too(kind: Kind) {
    let (mut driver, gates) = held(kind, 1);
    let before = gates[0].submitted();
    // The worker waits in the first submission, and takes the others after the function.
    let held = gates[0].hold_up();
    let first = driver.post_command(REQUESTS, lun(0), 1, &write_10(0, 1), &[7; 512], 0);
    driver.kick(REQUESTS);
    wait_until("the first write", || gates[0].submitted() > before);
    let rest: Vec<_> = (1..4)
        .map(|lba| driver.post_command(REQUESTS, lun(0), 1, &write_10(lba, 1), &[7; 512], 0))
        .collect();
    driver.kick(REQUESTS);
    let response = driver.post_function(ABORT_TASK_SET, lun(0), 0);
    held.send(()).unwrap();
    gates[0].open();
    driver.next_used(CONTROL);
    assert_eq!(driver.memory.read_obj::<u8>(response).unwrap(), OK);
    // All are answered; a command that has ended before the function reached it is fine.
    assert_eq!(
        driver.rings[REQUESTS]
            .used_index()
            .wrapping_sub(driver.rings[REQUESTS].last_used()),
        4
    );
    for posted in [first].iter().chain(&rest) {
        let answer = driver.command_answer(posted, 108);
        assert!(matches!(answer.response, OK | ABORTED), "{answer:?}");
    }
}
