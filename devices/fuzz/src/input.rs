//! A fuzz input, read byte by byte: each byte makes a small choice.

/// The rest of an input. Zeroes follow its last byte.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Starts at the first byte.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether the input is used up, so that only zeroes follow.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        first
    }

    /// The next bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    /// An element of `table`, which is not empty.
    pub fn of<T: Copy>(&mut self, table: &[T]) -> T {
        table[usize::from(self.byte()) % table.len()]
    }

    /// An edge case from `odd`, or the value that `usual` makes of a byte.
    pub fn pick(&mut self, odd: &[u64], usual: impl Fn(u64) -> u64) -> u64 {
        let byte = self.byte();
        let odd = odd.get(usize::from(!byte));
        odd.copied().unwrap_or_else(|| usual(byte.into()))
    }
}
