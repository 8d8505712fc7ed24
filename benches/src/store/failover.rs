//! For `walvisor-bench drbd`: clients that print each acknowledged commit until their machine dies,
//! and a check of which commits the machine that takes over has.

use std::path::PathBuf;
use std::process::exit;
use std::thread;

use clap::Args;
use walvisor::commands::CommandError;
use walvisor_storage::{CacheMode, Disk, Operation, SECTOR_SIZE, Store, create_disk};

use super::client::StoreClient;
use super::site::{image, log, open, ring};
use crate::blocks::{BLOCK, damage_error, is_stamped, stamped_block};

/// Blocks that each client overwrites in turn.
const CLIENT_BLOCKS: u64 = 16;

/// Arguments of both commands.
#[derive(Debug, Args)]
pub struct FailoverArguments {
    /// Directory of the disk and its log
    #[arg(long)]
    dir: PathBuf,
    /// Number of clients
    #[arg(long)]
    clients: u16,
}

impl FailoverArguments {
    fn open(&self) -> Result<Store, CommandError> {
        open(&self.dir, 1, CacheMode::Writeback, &ring(0))
    }
}

fn sector(client: u64, block: u64) -> u64 {
    (client * CLIENT_BLOCKS + block) * BLOCK as u64 / SECTOR_SIZE
}

/// Creates a disk. Its clients commit, and print `guest: acknowledged CLIENT NUMBER` after each
/// acknowledged FLUSH. Never returns without an error.
///
/// # Errors
/// If the store fails.
pub fn acknowledge(arguments: &FailoverArguments) -> Result<(), CommandError> {
    let bytes = u64::from(arguments.clients) * CLIENT_BLOCKS * BLOCK as u64;
    let dir = &arguments.dir;
    create_disk(&image(dir, 0), bytes, &log(dir), &ring(0)).map_err(CommandError::failed)?;
    let store = arguments.open()?;
    let disk = &store.disks()[0];
    thread::scope(|scope| {
        for client in 0..arguments.clients {
            scope.spawn(move || {
                if let Err(error) = commit(disk, client.into()) {
                    println!("guest: failed: {error:?}");
                    exit(1);
                }
            });
        }
    });
    Ok(())
}

fn commit(disk: &Disk, client: u64) -> Result<(), CommandError> {
    let mut port = StoreClient::open(disk)?;
    for number in 1.. {
        let sector = sector(client, number % CLIENT_BLOCKS);
        let data = stamped_block(BLOCK, client, number);
        port.run(Operation::Write { sector, data })?;
        port.run(Operation::Flush)?;
        println!("guest: acknowledged {client} {number}");
    }
    Ok(())
}

/// Opens the disk, which recovers the log, and prints `guest: found CLIENT NUMBER` for the last
/// commit of each client that is there.
///
/// # Errors
/// If the log cannot be recovered, or a client's commits in it are not exactly its first ones.
pub fn survivors(arguments: &FailoverArguments) -> Result<(), CommandError> {
    let store = arguments.open()?;
    let mut port = StoreClient::open(&store.disks()[0])?;
    for client in 0..arguments.clients.into() {
        let mut blocks = Vec::new();
        for block in 0..CLIENT_BLOCKS {
            blocks.push(port.read(sector(client, block))?);
        }
        let number = |block: &[u8]| u64::from_le_bytes(block[8..16].try_into().expect("8 bytes"));
        let last = blocks.iter().map(|block| number(block)).max().unwrap_or(0);
        for (at, block) in (0..).zip(&blocks) {
            // The newest commit to this block up to the last one; none if that is 0 or less.
            let newest = last.checked_sub((last + CLIENT_BLOCKS - at) % CLIENT_BLOCKS);
            let there = match newest {
                None | Some(0) => block.iter().all(|byte| *byte == 0),
                Some(newest) => is_stamped(block, client, newest),
            };
            if !there {
                return Err(damage_error(
                    &format!("client {client}, last commit {last}"),
                    at,
                ));
            }
        }
        println!("guest: found {client} {last}");
    }
    drop(port);
    store.close().map_err(CommandError::failed)
}
