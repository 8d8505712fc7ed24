//! The control socket of `walvisor run` and of the daemons: JSON, one line for a request and one for its
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
//! Requests and answers have the form of QMP (QEMU's `docs/interop/qmp-spec.rst`) without its greeting and
//! capabilities: a program that can write QMP can write these requests. A client's requests are carried out one
//! after the other, and answered in order. An export needs a descriptor, which comes with the request; events before its
//! answer tell how far it is. A look needs the descriptor of a socket that listens: it is served there, in this process. Clients do not wait for each other, except where both change the
//! same thing.

mod client;
mod command;
mod controlled;
mod lines;
mod looks;
mod requests;
mod server;
mod stats;

pub use client::{ask, ask_with};
pub use command::{CacheChoice, ControlCommand, ControlError, Format, LimitChange, LookRequest};
pub use controlled::{AddedDisk, ControlledProcess, DiskHotplug, Power, RemovalError};
pub use lines::MAX_LINE;
pub use server::{MAX_CLIENTS, Server};

/// Permissions of a control socket.
pub const CONTROL_MODE: u32 = 0o600;
