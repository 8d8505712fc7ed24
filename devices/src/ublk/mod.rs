//! ublk, Linux's driver for block devices in user space (ublk_drv): this process serves disks to
//! the kernel, each as /dev/ublkbN.
//!
//! ```text
//!   programs ─▶ /dev/ublkbN ─▶ blk-mq: N queues ─▶ ublk_drv
//!                                                   │ ▲
//!            descriptors in shared memory, a ring   │ │   COMMIT_AND_FETCH: the answer of a tag, and a wait for its
//!            entry for each request                 ▼ │   next request; all answers of a round in one system call
//!   ControlDevice, KernelDevice   make, take over, start and remove devices      control.rs
//!   QueueRing   a queue's ring; data is copied by pread and pwrite         queue.rs, layout.rs
//!   Device, ServedDevice   a disk, and its queues in the reactor           device.rs, worker.rs
//! ```
//! **A killed server.** Unless its disk says otherwise, a device is made with USER_RECOVERY and
//! USER_RECOVERY_REISSUE: when the server dies, the kernel keeps the device, its requests wait, and
//! those without an answer are sent to the next server. That loses nothing only if all that was
//! answered outlives the process, so a change is answered once it is written
//! ([`BackendQueue::notify_written`](crate::backend::BackendQueue::notify_written)).
//!
//! **Data** is copied with USER_COPY: each request has a buffer of its own, charged to the memory
//! budget when the request is taken, and the kernel never writes into memory of this process.
//!
//! **Unprivileged devices** are not offered: the driver clears the recovery flags of those.
//!
//! Why not the crate `libublk`: its commands and queues run on an executor of its own, and a queue
//! here is a source of the reactor beside all others. Its definitions come from bindgen, which
//! wants libclang to build. `layout.rs` has the few that are needed.

mod control;
mod device;
mod layout;
mod queue;
mod worker;

pub use control::{
    ControlDevice, DeviceError, DeviceState, FoundDevice, KernelDevice, WantedDevice,
};
pub use device::{Device, ServedDevice};
pub use worker::WorkerPool;
