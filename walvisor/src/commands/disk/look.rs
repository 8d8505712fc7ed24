//! `walvisor disk look`: a disk as of a point, over NBD. The process that has the disk open serves
//! the look; if there is none, this one does.

use std::path::PathBuf;

use clap::Args;
use walvisor_storage::{DiskOptions, Look, Point, StoreOptions};

use super::path::SharedDisk;
use crate::commands::CommandError;
use crate::commands::look::{LookFiles, absolute, look_in_use, report};
use crate::commands::owner::cannot_look;
use crate::control_socket::{LookRequest, Looks};

/// The arguments of `walvisor disk look`.
#[derive(Args, Debug)]
pub(super) struct LookArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// The point: cid:N, lsn:N, snapshot:NAME, a time such as 12:03, 'yesterday 12:03' or
    /// 2026-11-22T12:03:00Z, a time before now such as -15m, or newest.
    #[arg(
        long,
        value_name = "AT",
        default_value = "newest",
        allow_hyphen_values = true
    )]
    at: Point,
    /// The Unix socket to create for NBD clients; only this user can connect. Several looks can be
    /// open, each on its own.
    #[arg(long, value_name = "SOCKET")]
    socket: PathBuf,
    /// Allow writes, which go to an unnamed file in TMPDIR or /var/tmp that is gone when the look
    /// ends.
    #[arg(long)]
    scratch: bool,
    /// Keep the look open when its last client is gone.
    #[arg(long)]
    keep: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `walvisor disk look`.
pub(super) fn look(arguments: &LookArguments) -> Result<(), CommandError> {
    let LookArguments {
        shared,
        at,
        socket,
        scratch,
        keep,
        json,
    } = arguments;
    let mut request = LookRequest {
        disk: None,
        at: at.to_string(),
        socket: socket.clone(),
        scratch: *scratch,
        keep: *keep,
    };
    if let Some((owner, choice)) = shared.owner() {
        request.disk = choice;
        return look_in_use(
            &request,
            (*json, Some(&shared.disk.path)),
            |command, files| owner.ask_with(command, files, &mut |_, _| {}),
        );
    }
    let LookFiles {
        listener,
        scratch,
        kept,
    } = LookFiles::make(socket, *scratch)?;
    let disk = &shared.disk;
    let options = StoreOptions::default();
    let look = Look::open(
        &DiskOptions::new(&disk.path),
        &disk.log(),
        *at,
        scratch,
        &options,
    );
    let look = look.map_err(cannot_look)?;
    request.socket = absolute(socket);
    let name = disk.path.display().to_string();
    let looks = Looks::default();
    let served = looks.serve(&name, look, &request, listener, kept.into_iter().collect());
    let served = served.map_err(|error| CommandError::Failed(format!("{name}: {error}")))?;
    report(served, *json);
    looks.wait();
    Ok(())
}
