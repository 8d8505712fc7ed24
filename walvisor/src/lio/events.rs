//! Changes that an administrator makes in configfs, as target_core_user reports them (generic
//! netlink, family TCM-USER, group config).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use netlink_packet_core::{
    DecodeError, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NlasIterator,
    ParseableParametrized, parse_string, parse_u8, parse_u64,
};
use netlink_packet_generic::ctrl::nlas::{GenlCtrlAttrs, McastGrpAttrs};
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlHeader, GenlMessage};
use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};

const FAMILY: &str = "TCM-USER";
const GROUP: &str = "config";

/// TCMU_CMD_RECONFIG_DEVICE. Other commands report that devices are added and removed.
const RECONFIGURE: u8 = 3;
/// Attributes (enum tcmu_genl_attr).
mod attribute {
    pub(super) const DEVICE: u16 = 1;
    pub(super) const CONFIG: u16 = 4;
    pub(super) const SIZE: u16 = 5;
    pub(super) const WRITE_CACHE: u16 = 6;
}

/// A change that an administrator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetChange {
    /// Another size, in bytes.
    Size(u64),
    /// Write cache on (writeback) or off (writethrough).
    WriteCache(bool),
    /// Another configuration string.
    Config(String),
}

/// A message of the family.
#[derive(Debug, Default)]
struct Message {
    device: String,
    change: Option<TargetChange>,
}

impl ParseableParametrized<[u8], GenlHeader> for Message {
    fn parse_with_param(buffer: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        let mut message = Self::default();
        if header.cmd != RECONFIGURE {
            return Ok(message);
        }
        for attribute in NlasIterator::new(buffer) {
            let attribute = attribute?;
            let value = attribute.value();
            match attribute.kind() {
                attribute::DEVICE => message.device = parse_string(value)?,
                attribute::CONFIG => {
                    message.change = Some(TargetChange::Config(parse_string(value)?))
                }
                attribute::SIZE => message.change = Some(TargetChange::Size(parse_u64(value)?)),
                attribute::WRITE_CACHE => {
                    message.change = Some(TargetChange::WriteCache(parse_u8(value)? != 0));
                }
                _ => {}
            }
        }
        Ok(message)
    }
}

/// A listener for the changes of all devices.
pub struct Events {
    socket: Socket,
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket's descriptor, which is open for as long as the socket is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.socket.as_raw_fd()) }
    }
}

impl Events {
    /// Starts to listen; earlier changes are not reported.
    ///
    /// # Errors
    /// If the kernel has no such family, or refuses the socket.
    pub fn listen() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_GENERIC)?;
        socket.bind_auto()?;
        let group = group_of(&socket)?;
        socket.add_membership(group)?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket })
    }

    /// The next change, with the device's name as UIO shows it; `None` if there is no further one
    /// now.
    ///
    /// # Errors
    /// If events were lost, or cannot be read.
    pub fn next(&self) -> io::Result<Option<(String, TargetChange)>> {
        loop {
            let (bytes, sender) = match self.socket.recv_from_full() {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            };
            // Other processes can send to this socket too; only the kernel has port 0.
            if sender.port_number() != 0 {
                continue;
            }
            if let Some(event) = parse(&bytes) {
                return Ok(Some(event));
            }
        }
    }
}

fn parse(bytes: &[u8]) -> Option<(String, TargetChange)> {
    let message = NetlinkMessage::<GenlMessage<Message>>::deserialize(bytes).ok()?;
    let NetlinkPayload::InnerMessage(message) = message.payload else {
        return None;
    };
    let Message { device, change } = message.payload;
    Some((device, change?))
}

/// The number of the netlink group, which the kernel assigns when it loads the module.
fn group_of(socket: &Socket) -> io::Result<u32> {
    let mut message = NetlinkMessage::from(GenlMessage::from_payload(GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName(FAMILY.to_owned())],
    }));
    message.header.flags = NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
    let (bytes, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<GenlMessage<GenlCtrl>>::deserialize(&bytes);
    match answer.map_err(io::Error::other)?.payload {
        NetlinkPayload::InnerMessage(answer) => find_group(&answer.payload)
            .ok_or_else(|| io::Error::other(format!("netlink family {FAMILY} has no {GROUP}"))),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        _ => Err(io::Error::other("netlink gives no answer")),
    }
}

fn find_group(family: &GenlCtrl) -> Option<u32> {
    let groups = family.nlas.iter().find_map(|nla| match nla {
        GenlCtrlAttrs::McastGroups(groups) => Some(groups),
        _ => None,
    })?;
    let named = |group: &&Vec<McastGrpAttrs>| {
        let name = McastGrpAttrs::Name(GROUP.to_owned());
        group.contains(&name)
    };
    groups.iter().find(named)?.iter().find_map(|nla| match nla {
        McastGrpAttrs::Id(id) => Some(*id),
        McastGrpAttrs::Name(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with the layout that the kernel uses.
    fn message(command: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut payload = vec![command, 2, 0, 0];
        for (kind, value) in attributes {
            payload.extend((value.len() as u16 + 4).to_ne_bytes());
            payload.extend(kind.to_ne_bytes());
            payload.extend(*value);
            payload.resize(payload.len().next_multiple_of(4), 0);
        }
        let mut bytes = (payload.len() as u32 + 16).to_ne_bytes().to_vec();
        // Family 33, then no flags, sequence number or port.
        bytes.extend([33, 0, 0, 0]);
        bytes.extend([0; 8]);
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn changes_are_read() {
        let name = (attribute::DEVICE, &b"tcm-user/0/a/walvisor/a.img\0"[..]);
        let minor = (2, &7_u32.to_ne_bytes()[..]);
        let size = (1_u64 << 40).to_ne_bytes();
        for (kind, value, change) in [
            (attribute::SIZE, &size[..], TargetChange::Size(1 << 40)),
            (
                attribute::WRITE_CACHE,
                &[0],
                TargetChange::WriteCache(false),
            ),
            (attribute::WRITE_CACHE, &[1], TargetChange::WriteCache(true)),
            (
                attribute::CONFIG,
                b"x/y\0",
                TargetChange::Config("x/y".into()),
            ),
        ] {
            let event = parse(&message(RECONFIGURE, &[name, minor, (kind, value)]));
            let device = "tcm-user/0/a/walvisor/a.img".to_owned();
            assert_eq!(event, Some((device, change)));
        }
    }

    #[test]
    fn messages_without_a_change_are_skipped() {
        let size = (attribute::SIZE, &[0; 8][..]);
        let whole = message(RECONFIGURE, &[size]);
        assert!(parse(&whole).is_some());
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "cut at {end}");
        }
        assert_eq!(parse(&message(1, &[size])), None);
        assert_eq!(parse(&message(RECONFIGURE, &[])), None);
        assert_eq!(
            parse(&message(RECONFIGURE, &[(attribute::SIZE, &[0; 3])])),
            None
        );
    }
}
