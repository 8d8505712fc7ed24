//! Turns bytes into text. A byte below 0x80 stands for itself; other bytes stand for words of the
//! protocol, so that a change of one byte changes the request.

/// The client's next step.
pub enum Piece {
    /// The client sends this text.
    Text(Vec<u8>),
    /// The guest makes a request meanwhile.
    Request,
}

/// The words that the bytes from 0x80 on stand for. Inputs of the corpus keep their meaning: new
/// words come last.
pub const WORDS: [&str; 82] = [
    "{\"execute\":\"stats\"}\n",
    "{\"execute\":\"stats\",\"arguments\":{\"format\":\"prometheus\"}}\n",
    "{\"execute\":\"pause\"}\n",
    "{\"execute\":\"resume\"}\n",
    "{\"execute\":\"resize\",\"arguments\":{\"disk\":\"raw\",\"size_bytes\":",
    "{\"execute\":\"resize\",\"arguments\":{\"disk\":\"ram\",\"size_bytes\":",
    "{\"execute\":\"set-cache\",\"arguments\":{\"disk\":\"ram\",\"cache\":\"writethrough\"}}\n",
    "{\"execute\":\"set-cache\",\"arguments\":{\"disk\":\"raw\",\"cache\":\"writethrough\"}}\n",
    "{\"execute\":\"set-cache\",\"arguments\":{\"disk\":\"raw\",\"cache\":\"writeback\"}}\n",
    "{\"execute\":\"set-limit\",\"arguments\":{\"disk\":\"ram\",\"ops_per_second\":",
    "{\"execute\":\"set-limit\",\"arguments\":{\"disk\":\"raw\",\"bytes_per_second\":",
    "{\"execute\":\"checkpoint\"}\n",
    "{\"execute\":\"checkpoint\",\"arguments\":{\"disk\":\"raw\"}}\n",
    "{\"execute\":\"shutdown\"}\n",
    "{\"execute\":\"shutdown\",\"arguments\":{\"now\":true}}\n",
    "{\"execute\":\"",
    "\"arguments\":{",
    "\"disk\":\"",
    "\"id\":",
    "\"size_bytes\":",
    "\"cache\":",
    "\"writeback\"",
    "\"ops_burst\":",
    "\"bytes_burst\":",
    "\"ops_per_second\":",
    "\"bytes_per_second\":",
    "\"format\":",
    "\"now\":",
    "stats",
    "pause",
    "resume",
    "resize",
    "set-cache",
    "set-limit",
    "checkpoint",
    "shutdown",
    "raw",
    "ram",
    "65536",
    "131072",
    "9223372036854775296",
    "18446744073709551615",
    "-1",
    "1e300",
    "null",
    "\\ud800",
    "\\u0000",
    "}}\n",
    "\"}\n",
    "\",",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "\u{fffd}",
    "{\"execute\":\"export\",\"arguments\":{\"disk\":\"raw\"}}\n",
    "{\"a\":{\"a\":{\"a\":{\"a\":",
    "]]]]",
    "}}}}",
    "\"at\":\"lsn:0\"",
    "export",
    "snapshot",
    "snapshots",
    "snapshot-delete",
    "points",
    "restore",
    "mark",
    "set-retain",
    "look",
    "unlook",
    "looks",
    "exports",
    "export-cancel",
    "add-disk",
    "remove-disk",
    "config",
    "{\"execute\":\"looks\"}\n",
    "{\"execute\":\"exports\"}\n",
    "\"at\":\"newest\"",
    "\"name\":\"one\"",
    "\"text\":\"one\"",
    "\"retain\":\"all\"",
    "\"give_up_history\":true",
    "\"spec\":\"path=/dev/null,socket=s\"",
    "\"weight\":",
];
/// A byte from `LONG` on below `REQUEST` stands for a power of two of bytes, to make a line too
/// long.
const LONG: u8 = 0xf0;
const _: () = assert!(WORDS.len() <= (LONG - 0x80) as usize);
/// This byte stands for a request of the guest.
const REQUEST: u8 = 0xfd;
/// The byte after this one stands for itself, whatever its value.
const RAW: u8 = 0xff;

/// Ends a pause and lifts the limits, which would hold up the disks, and asks for the statistics.
pub const AFTERWARDS: [&[u8]; 4] = [
    b"{\"execute\":\"resume\"}\n",
    b"{\"execute\":\"set-limit\",\"arguments\":{\"disk\":\"ram\",\"ops_per_second\":0,\"bytes_per_second\":0}}\n",
    b"{\"execute\":\"set-limit\",\"arguments\":{\"disk\":\"raw\",\"ops_per_second\":0,\"bytes_per_second\":0}}\n",
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
                    let word = WORDS.get(usize::from(byte - 0x80)).unwrap_or(&"\n");
                    text.extend_from_slice(word.as_bytes());
                }
                byte => text.push(byte),
            }
        }
        pieces.push(Piece::Text(text));
    }
    pieces
}
