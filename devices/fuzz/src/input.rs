//! An input as a target reads it: a byte after the other, each a small choice.

/// What is left of the input; zeroes follow.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing but zeroes follows.
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

    /// An odd number from `odd`, or what `usual` makes of a byte.
    pub fn pick(&mut self, odd: &[u64], usual: impl Fn(u64) -> u64) -> u64 {
        let byte = self.byte();
        let odd = odd.get(usize::from(!byte));
        odd.copied().unwrap_or_else(|| usual(byte.into()))
    }
}
