//! The control socket of `walvisor run` and of the daemons: JSON, one line per request and one per
//! answer, over a Unix socket of mode 0600.
//!
//! ```text
//!   walvisor ctl ──▶ {"execute": "resize", "arguments": {"disk": "a", "size_bytes": 1073741824}, "id": 1}
//!                                                    │ lines.rs: bounded
//!   Server: a thread a client ──────────────────────▶│ command.rs: what it asks for
//!                                                    ▼
//!                                     ControlledProcess: disks, vCPUs, the end     controlled.rs, requests.rs, stats.rs
//!                                                    │
//!            {"return": {...}, "id": 1} ◀────────────┴───────▶ {"error": {"class": "...", "desc": "..."}, "id": 1}
//! ```
//! Requests and answers have the form of QMP (QEMU's `docs/interop/qmp-spec.rst`) without its
//! greeting and capabilities, so a program that speaks QMP can speak this. A client's requests are
//! carried out and answered in order. Clients do not wait for each other, unless both change
//! something.
//!
//! An export needs the descriptor of a file, which comes with the request, and sends events with
//! its progress before its answer. A look needs the descriptor of a listening socket, where this
//! process serves it.

mod client;
mod command;
mod controlled;
mod exports;
#[cfg(test)]
pub(crate) mod fixture;
mod lines;
mod looks;
mod requests;
mod server;
mod stats;

pub use client::{ask, ask_on, ask_with};
pub use command::{
    CacheChoice, ControlCommand, ControlError, DiskChoice, LimitChange, LookRequest, StatsFormat,
};
pub use controlled::{
    AddedDisk, ControlledProcess, DiskHotplug, Power, RemovalError, SavedDisk, SavedPool,
};
pub use lines::{MAX_DEPTH, MAX_LINE};
pub(crate) use looks::Looks;
pub use server::{MAX_CLIENTS, Server};

/// Permissions of a control socket.
pub const CONTROL_MODE: u32 = 0o600;
