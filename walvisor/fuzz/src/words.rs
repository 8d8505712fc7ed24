//! Turns bytes into text. A byte below 0x80 stands for itself; other bytes stand for words of the
//! protocol, so that a change of one byte changes the request.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use walvisor::control_socket::ControlCommand;

/// The client's next step.
pub enum Piece {
    /// The client sends this text.
    Text(Vec<u8>),
    /// The guest makes a request meanwhile.
    Request,
}

/// What stands around names, and values. The bytes from 0x80 on stand for these words, and then for
/// those of the commands.
const REST: [&str; 33] = [
    "}\n",
    "}}\n",
    "\"}\n",
    ",\"arguments\":{",
    "{\"execute\":\"",
    "\"id\":",
    "\",",
    "\"disk\":\"raw\"",
    "\"disk\":\"ram\"",
    "65536",
    "131072",
    "9223372036854775296",
    "18446744073709551615",
    "-1",
    "1e300",
    "null",
    "true",
    "\"writeback\"",
    "\"writethrough\"",
    "\"prometheus\"",
    "\"lsn:0\"",
    "\"newest\"",
    "\"one\"",
    "\"all\"",
    "\"path=/dev/null,socket=s\"",
    "\\ud800",
    "\\u0000",
    "\u{fffd}",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{\"a\":{\"a\":{\"a\":{\"a\":",
    "]]]]",
    "}}}}",
    "\n",
];

/// The words: of each command the beginning of its request, of each argument its name.
static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let names = ControlCommand::names().iter();
    let requests = names
        .clone()
        .map(|name| format!("{{\"execute\":\"{name}\""));
    let arguments: BTreeSet<_> = names
        .flat_map(|name| ControlCommand::arguments(name))
        .collect();
    let arguments = arguments.iter().map(|name| format!("\"{name}\":"));
    let rest = REST.iter().map(|word| (*word).to_owned());
    let words: Vec<_> = rest.chain(requests).chain(arguments).collect();
    assert!(words.len() <= usize::from(LONG - 0x80), "a byte for each");
    words
});
/// A byte from `LONG` on below `REQUEST` stands for a power of two of bytes, to make a line too
/// long.
const LONG: u8 = 0xf0;
/// This byte stands for a request of the guest.
const REQUEST: u8 = 0xfd;
/// The byte after this one stands for itself, whatever its value.
const RAW: u8 = 0xff;

/// Ends a pause and lifts the limits, which would hold up the disks, and asks for the statistics.
pub const AFTERWARDS: [&[u8]; 4] = [
    b"{\"execute\":\"resume\"}\n",
    b"{\"execute\":\"limits\",\"arguments\":{\"disk\":\"ram\",\"ops_per_second\":0,\"bytes_per_second\":0}}\n",
    b"{\"execute\":\"limits\",\"arguments\":{\"disk\":\"raw\",\"ops_per_second\":0,\"bytes_per_second\":0}}\n",
    b"{\"execute\":\"stats\",\"id\":{\"the\":\"end\"}}",
];

/// The pieces that an input stands for, each made of `len` input bytes.
pub fn pieces(input: &[u8], len: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for part in input.chunks(len) {
        let mut text = Vec::new();
        let mut bytes = part.iter().copied();
        while let Some(byte) = bytes.next() {
            match byte {
                RAW => text.extend(bytes.next()),
                REQUEST => {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                    pieces.push(Piece::Request);
                }
                LONG..REQUEST => text.resize(text.len() + (1 << (byte - LONG)), b'"'),
                0x80.. => {
                    let word = WORDS.get(usize::from(byte - 0x80));
                    text.extend(word.map_or("\n", String::as_str).as_bytes());
                }
                byte => text.push(byte),
            }
        }
        pieces.push(Piece::Text(text));
    }
    pieces
}
