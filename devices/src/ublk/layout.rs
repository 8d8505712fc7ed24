//! What the driver and its server exchange, and how (linux/ublk_cmd.h).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::backend::{Backend, SECTOR_SIZE};
use crate::latency::OperationKind;

/// Commands to /dev/ublk-control and to /dev/ublkcN: ioctl numbers of type 'u'.
pub(super) mod command {
    const READ: u32 = 2;
    const BOTH: u32 = 3;

    const fn number(direction: u32, number: u32, len: usize) -> u32 {
        direction << 30 | (len as u32) << 16 | (b'u' as u32) << 8 | number
    }

    const fn control(direction: u32, nr: u32) -> u32 {
        number(direction, nr, size_of::<super::ControlCommand>())
    }

    pub(crate) const GET_INFO: u32 = control(READ, 0x02);
    pub(crate) const ADD: u32 = control(BOTH, 0x04);
    pub(crate) const DELETE: u32 = control(BOTH, 0x05);
    pub(crate) const START: u32 = control(BOTH, 0x06);
    pub(crate) const STOP: u32 = control(BOTH, 0x07);
    pub(crate) const SET_PARAMETERS: u32 = control(BOTH, 0x08);
    pub(crate) const GET_PARAMETERS: u32 = control(READ, 0x09);
    pub(crate) const START_RECOVERY: u32 = control(BOTH, 0x10);
    pub(crate) const END_RECOVERY: u32 = control(BOTH, 0x11);
    pub(crate) const GET_FEATURES: u32 = control(READ, 0x13);
    pub(crate) const UPDATE_SIZE: u32 = control(BOTH, 0x15);

    pub(crate) const FETCH: u32 = number(BOTH, 0x20, size_of::<super::IoCommand>());
    pub(crate) const COMMIT_AND_FETCH: u32 = number(BOTH, 0x21, size_of::<super::IoCommand>());
}

/// Flags of a device, and the kernel's features.
pub(super) mod flag {
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub(crate) const USER_COPY: u64 = 1 << 7;
    pub(crate) const UPDATE_SIZE: u64 = 1 << 10;
}

/// States of a device.
pub(super) mod state {
    /// Added and not started, or its server is gone and it was stopped.
    pub(crate) const DEAD: u16 = 0;
    pub(crate) const LIVE: u16 = 1;
    /// Its server is gone, and its requests wait.
    pub(crate) const QUIESCED: u16 = 2;
}

/// Offset in /dev/ublkcN of the requests' data, and of the descriptors of a queue.
const DATA_OFFSET: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;
/// The most requests of a queue. The descriptors of each queue have room for as many.
pub(super) const MAX_DEPTH: usize = 4096;

/// The longest READ or WRITE of a device in bytes.
pub(super) const MAX_IO_BYTES: u32 = 1 << 20;
/// The most sectors of a DISCARD or WRITE_ZEROES: 2 GiB, so that the work of one is bounded.
const MAX_ERASE_SECTORS: u32 = 1 << 22;
/// The alignment of the log, as a power of two, and the usual block of media under images.
const PHYSICAL_SHIFT: u8 = 12;

/// `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    pub(super) queue: u16,
    /// Length of the value at `address`.
    pub(super) len: u16,
    pub(super) address: u64,
    pub(super) data: u64,
    pub(super) path: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

impl ControlCommand {
    /// A command for a device as a whole.
    pub(super) fn of(device: u32, data: u64) -> Self {
        Self {
            device,
            queue: u16::MAX,
            len: 0,
            address: 0,
            data,
            path: 0,
            pad: 0,
            reserved: 0,
        }
    }
}

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) pad: u16,
    pub(super) max_io_bytes: u32,
    pub(super) device: u32,
    pub(super) process: i32,
    pub(super) pad2: u32,
    pub(super) flags: u64,
    /// The server's own; the driver only keeps it.
    pub(super) identity: u64,
    pub(super) owner: [u32; 2],
    pub(super) reserved: [u64; 2],
}

/// `struct ublksrv_io_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) result: i32,
    pub(super) address: u64,
}

/// `struct ublksrv_io_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Descriptor {
    /// The operation in the low 8 bits, flags above.
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) sector: u64,
    pub(super) address: u64,
}

const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: OperationKind,
    pub(super) sector: u64,
    pub(super) sectors: u32,
    /// A write that must be durable before it is answered.
    pub(super) fua: bool,
    /// Whether WRITE_ZEROES may free the space.
    pub(super) unmap: bool,
}

impl Descriptor {
    /// The request; `None`: its operation is unknown, or its length is wrong.
    pub(super) fn request(&self) -> Option<Request> {
        let kind = match self.op_flags & 0xff {
            0 => OperationKind::Read,
            1 => OperationKind::Write,
            2 => OperationKind::Flush,
            3 => OperationKind::Discard,
            5 => OperationKind::WriteZeroes,
            _ => return None,
        };
        let request = Request {
            kind,
            sector: self.sector,
            sectors: self.sectors,
            fua: self.op_flags & FUA != 0,
            unmap: self.op_flags & NO_UNMAP == 0,
        };
        let most = u64::from(MAX_IO_BYTES);
        (request.payload() <= most && (kind == OperationKind::Flush || self.sectors > 0))
            .then_some(request)
    }
}

impl Request {
    /// Bytes that it reads or writes.
    pub(super) fn payload(&self) -> u64 {
        match self.kind {
            OperationKind::Read | OperationKind::Write => u64::from(self.sectors) * SECTOR_SIZE,
            _ => 0,
        }
    }
}

/// Where in /dev/ublkcN the data of a request is.
pub(super) fn data_offset(queue: u16, tag: u16) -> u64 {
    DATA_OFFSET + (u64::from(queue) << QUEUE_SHIFT) + (u64::from(tag) << TAG_SHIFT)
}

/// Offset and length of a queue's descriptors in /dev/ublkcN.
pub(super) fn descriptors(queue: u16, depth: u16, page: usize) -> (u64, usize) {
    let pages = |entries: usize| (entries * size_of::<Descriptor>()).next_multiple_of(page);
    let offset = u64::from(queue) * pages(MAX_DEPTH) as u64;
    (offset, pages(depth.into()))
}

/// Attributes of a device.
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const HAS_FUA: u32 = 1 << 3;
/// Parts of [`Parameters`].
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;

/// `struct ublk_params` without its optional end.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub(super) struct Parameters {
    pub(super) len: u32,
    types: u32,
    attributes: u32,
    logical_shift: u8,
    physical_shift: u8,
    optimal_shift: u8,
    minimal_shift: u8,
    max_sectors: u32,
    chunk_sectors: u32,
    /// The device's size.
    pub(super) sectors: u64,
    boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    max_discard_sectors: u32,
    max_zeroes_sectors: u32,
    max_discard_segments: u16,
    pad: u16,
    pad2: u32,
}

impl Parameters {
    /// What a device over `backend` with logical blocks of `block_size` bytes can do: only what the
    /// backend does.
    pub(super) fn of(backend: &dyn Backend, block_size: u32) -> Self {
        let can = backend.capabilities();
        let mut attributes = 0;
        if can.read_only {
            attributes |= READ_ONLY;
        }
        if can.flush && backend.write_cache() {
            attributes |= VOLATILE_CACHE | HAS_FUA;
        }
        let erase = |can_do: bool| {
            if can_do && !can.read_only {
                MAX_ERASE_SECTORS
            } else {
                0
            }
        };
        let block = u64::from(block_size) / SECTOR_SIZE;
        let most = backend.max_request_bytes().min(MAX_IO_BYTES as usize);
        Self {
            len: size_of::<Self>() as u32,
            types: BASIC | DISCARD,
            attributes,
            logical_shift: block_size.ilog2() as u8,
            physical_shift: PHYSICAL_SHIFT,
            optimal_shift: PHYSICAL_SHIFT,
            minimal_shift: PHYSICAL_SHIFT,
            max_sectors: (most as u64 / SECTOR_SIZE) as u32,
            sectors: backend.sectors() / block * block,
            discard_granularity: 1 << PHYSICAL_SHIFT,
            max_discard_sectors: erase(can.discard),
            max_zeroes_sectors: erase(can.write_zeroes),
            max_discard_segments: 1,
            ..Self::default()
        }
    }

    /// Whether the kernel sends FLUSH and FUA.
    pub(super) fn has_volatile_cache(&self) -> bool {
        self.attributes & VOLATILE_CACHE != 0
    }

    /// Whether a device with these can be served by `server`, which offers at least as much.
    pub(super) fn fits(&self, server: &Self) -> bool {
        let has = |parameters: &Self, attribute| parameters.attributes & attribute != 0;
        // A writethrough server answers FLUSHes too, but a kernel that believes in one sends none.
        (has(self, VOLATILE_CACHE) || !has(server, VOLATILE_CACHE))
            && (has(self, READ_ONLY) || !has(server, READ_ONLY))
            && self.logical_shift == server.logical_shift
            && self.sectors <= server.sectors
            && self.max_sectors <= server.max_sectors
            && self.max_discard_sectors <= server.max_discard_sectors
            && self.max_zeroes_sectors <= server.max_zeroes_sectors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ram::RamDisk;

    #[test]
    fn structs_and_commands_are_those_of_the_header() {
        assert_eq!(size_of::<ControlCommand>(), 32);
        assert_eq!(size_of::<DeviceInfo>(), 64);
        assert_eq!(size_of::<IoCommand>(), 16);
        assert_eq!(size_of::<Descriptor>(), 24);
        // As much as a command's value has room for.
        assert_eq!(size_of::<Parameters>(), 64);
        assert_eq!(std::mem::offset_of!(Parameters, sectors), 24);
        assert_eq!(std::mem::offset_of!(Parameters, discard_alignment), 40);
        assert_eq!(std::mem::offset_of!(DeviceInfo, identity), 32);
        assert_eq!(command::ADD, 0xc020_7504);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(command::COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn descriptors_become_requests() {
        let request = |op_flags, sectors| {
            let descriptor = Descriptor {
                op_flags,
                sectors,
                sector: 80,
                address: 0,
            };
            descriptor.request()
        };
        let write = request(1 | FUA | 1 << 8, 16).unwrap();
        assert_eq!((write.kind, write.sector), (OperationKind::Write, 80));
        assert!(write.fua && write.payload() == 8192);
        assert!(!request(1, 16).unwrap().fua);
        let zeroes = request(5 | NO_UNMAP, 1 << 20).unwrap();
        assert_eq!((zeroes.unmap, zeroes.payload()), (false, 0));
        assert!(request(5, 8).unwrap().unmap && request(3, 1 << 20).is_some());
        assert_eq!(request(2, 0).unwrap().kind, OperationKind::Flush);
        // WRITE_SAME, a zone operation, and what no driver sends.
        for unknown in [4, 10, 36, 0xff] {
            assert_eq!(request(unknown, 8), None, "{unknown}");
        }
        assert_eq!((request(0, 0), request(3, 0)), (None, None));
        assert!(request(0, 2048).is_some() && request(0, 2049).is_none());
    }

    #[test]
    fn places_in_the_character_device_do_not_overlap() {
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        assert_eq!(data_offset(0, 1) - data_offset(0, 0), 32 << 20);
        assert_eq!(data_offset(1, 0) - data_offset(0, 65_535), 32 << 20);
        assert_eq!(descriptors(0, 1, 4096), (0, 4096));
        assert_eq!(descriptors(2, 256, 4096), (2 * 98_304, 8192));
        let (offset, len) = descriptors(63, 4096, 65_536);
        assert!(offset + (len as u64) < DATA_OFFSET);
    }

    #[test]
    fn a_device_offers_what_its_backend_does() {
        let disk = RamDisk::new(2055);
        let parameters = Parameters::of(&disk, 4096);
        assert_eq!((parameters.logical_shift, parameters.sectors), (12, 2048));
        assert_eq!(parameters.max_sectors, 2048);
        assert_eq!(
            parameters.has_volatile_cache(),
            disk.capabilities().flush && disk.write_cache()
        );
        assert_eq!(
            parameters.max_discard_sectors > 0,
            disk.capabilities().discard
        );
    }

    #[test]
    fn a_waiting_device_is_taken_over_only_by_a_server_that_can_do_as_much() {
        let cached = Parameters {
            sectors: 2048,
            logical_shift: 9,
            max_sectors: 2048,
            attributes: VOLATILE_CACHE | HAS_FUA,
            max_discard_sectors: 1024,
            ..Parameters::default()
        };
        let stable = Parameters {
            attributes: 0,
            ..cached
        };
        assert!(cached.fits(&cached) && cached.fits(&stable));
        // It would not send FLUSH to the server that needs it.
        assert!(!stable.fits(&cached));
        let larger = Parameters {
            sectors: 4096,
            ..cached
        };
        assert!(cached.fits(&larger) && !larger.fits(&cached));
        let read_only = Parameters {
            attributes: READ_ONLY,
            ..cached
        };
        assert!(!cached.fits(&read_only) && read_only.fits(&stable));
        let blocks = Parameters {
            logical_shift: 12,
            ..cached
        };
        let no_discard = Parameters {
            max_discard_sectors: 0,
            ..cached
        };
        assert!(!cached.fits(&blocks) && !cached.fits(&no_discard));
    }
}
