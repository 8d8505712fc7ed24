//! Closed loops over vhost-user: a virtio driver in this process.

use std::time::Duration;

use walvisor_testkit::vhost_user_client::VhostUserClient;

use super::loops::{LoadJob, Loops, NextRequest, Tally};
use crate::blocks::BLOCK;

/// Even on the slowest machine no request takes this long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs closed loops in this thread, over `queues` queues of each of `clients`, with `depth`
/// requests in flight in each queue, on disks of `bytes` bytes.
///
/// # Errors
/// If a request fails, or no request ends for half a minute.
pub fn drive(
    clients: &mut [VhostUserClient],
    (job, queues, depth): (LoadJob, usize, usize),
    bytes: u64,
    turn: Duration,
) -> std::io::Result<Tally> {
    let each = queues * depth;
    let mut running = clients.len() * each;
    let mut loops = Loops::new(job, running, bytes, turn, 1);
    let data = [0x5a; BLOCK];
    let submit = |client: &mut VhostUserClient, slot: usize, next: NextRequest| {
        let queue = slot / depth;
        match next {
            NextRequest::Read(offset) => client.read(queue, slot, offset, BLOCK),
            NextRequest::Write(offset) => client.write(queue, slot, offset, &data),
            NextRequest::Flush => client.flush(queue, slot),
        }
    };
    for (at, client) in clients.iter_mut().enumerate() {
        for slot in 0..each {
            submit(client, slot, loops.begin(at * each + slot));
        }
        (0..queues).for_each(|queue| client.kick(queue));
    }
    while running > 0 {
        let mut any = false;
        for (at, client) in clients.iter_mut().enumerate() {
            for queue in 0..queues {
                let ended = client.ended(queue);
                for &(slot, status) in &ended {
                    if status != 0 {
                        return Err(std::io::Error::from_raw_os_error(-status));
                    }
                    match loops.complete(at * each + slot) {
                        Some(next) => submit(client, slot, next),
                        None => running -= 1,
                    }
                }
                if !ended.is_empty() {
                    any = true;
                    client.kick(queue);
                }
            }
        }
        if !any {
            VhostUserClient::wait_for_any(clients, REQUEST_TIMEOUT)?;
        }
    }
    Ok(loops.tally())
}
