//! A command's data, in memory of the transport.

/// A command's data buffer: memory of the transport, possibly scattered. Lengths and offsets are in
/// bytes.
///
/// It is the Data-Out Buffer of a command that sends data, and the Data-In Buffer of one that
/// receives data.
pub trait DataBuffer {
    /// Its length in bytes, which may be 0.
    fn len(&self) -> usize;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes out of it. `offset` and the length of `into` stay within [`len`](Self::len).
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Copies bytes into it. `offset` and the length of `from` stay within [`len`](Self::len).
    fn write(&self, offset: usize, from: &[u8]);

    /// Whether an access has failed, so that bytes are missing. A command then changes no blocks.
    fn has_failed(&self) -> bool {
        false
    }
}
