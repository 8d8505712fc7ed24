//! The bytes of a simulated file. Copies share the blocks that are equal, and each block is hashed
//! once.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock, OnceLock};

pub(super) const SECTOR: usize = 512;
const BLOCK: usize = 8 * SECTOR;

/// The bytes of a file. Those after its end are zero.
#[derive(Clone, Debug, Default)]
pub(super) struct Bytes {
    blocks: Vec<Arc<ByteBlock>>,
    len: usize,
}

#[derive(Debug)]
struct ByteBlock {
    bytes: [u8; BLOCK],
    /// Computed on first use.
    hash: OnceLock<u64>,
}

impl Clone for ByteBlock {
    /// For a copy that is about to change.
    fn clone(&self) -> Self {
        Self {
            bytes: self.bytes,
            hash: OnceLock::new(),
        }
    }
}

static ZEROES: LazyLock<Arc<ByteBlock>> = LazyLock::new(|| {
    Arc::new(ByteBlock {
        bytes: [0; BLOCK],
        hash: OnceLock::new(),
    })
});

impl Bytes {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The sector at `offset`, if it lies within the file.
    pub(super) fn sector(&self, offset: usize) -> Option<&[u8]> {
        let inside = offset.is_multiple_of(SECTOR) && offset + SECTOR <= self.len;
        inside.then(|| &self.blocks[offset / BLOCK].bytes[offset % BLOCK..][..SECTOR])
    }

    /// All whole sectors within the file.
    pub(super) fn sectors(&self) -> impl Iterator<Item = &[u8]> {
        let sectors = self
            .blocks
            .iter()
            .flat_map(|block| block.bytes.chunks(SECTOR));
        sectors.take(self.len / SECTOR)
    }

    /// Copies bytes from `offset` on; returns whether the file has as many.
    pub(super) fn read(&self, mut buffer: &mut [u8], mut offset: usize) -> bool {
        if offset + buffer.len() > self.len {
            return false;
        }
        while !buffer.is_empty() {
            let from = &self.blocks[offset / BLOCK].bytes[offset % BLOCK..];
            let len = from.len().min(buffer.len());
            let (now, later) = buffer.split_at_mut(len);
            now.copy_from_slice(&from[..len]);
            (buffer, offset) = (later, offset + len);
        }
        true
    }

    /// Changes a sector within the file.
    pub(super) fn put_sector(&mut self, offset: usize, sector: &[u8]) {
        assert!(offset.is_multiple_of(SECTOR) && offset + SECTOR <= self.len);
        let block = Arc::make_mut(&mut self.blocks[offset / BLOCK]);
        block.hash = OnceLock::new();
        block.bytes[offset % BLOCK..][..SECTOR].copy_from_slice(sector);
    }

    /// Cuts the file, or adds zeroes.
    pub(super) fn resize(&mut self, len: usize) {
        self.blocks.resize(len.div_ceil(BLOCK), ZEROES.clone());
        if len < self.len && !len.is_multiple_of(BLOCK) {
            let block = Arc::make_mut(self.blocks.last_mut().expect("a block"));
            block.hash = OnceLock::new();
            block.bytes[len % BLOCK..].fill(0);
        }
        self.len = len;
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(&mut bytes, 0);
        bytes
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        let block = |part: &[u8]| {
            let mut bytes = [0; BLOCK];
            bytes[..part.len()].copy_from_slice(part);
            let hash = OnceLock::new();
            Arc::new(ByteBlock { bytes, hash })
        };
        Self {
            blocks: bytes.chunks(BLOCK).map(block).collect(),
            len: bytes.len(),
        }
    }
}

impl Hash for Bytes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let of = |bytes: &[u8; BLOCK]| {
            let mut hasher = DefaultHasher::new();
            hasher.write(bytes);
            hasher.finish()
        };
        self.len.hash(state);
        for block in &self.blocks {
            let hash = block.hash.get_or_init(|| of(&block.bytes));
            state.write_u64(*hash);
        }
    }
}

#[test]
fn copies_are_apart_and_equal_bytes_have_equal_hashes() {
    let hash = |bytes: &Bytes| {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        hasher.finish()
    };
    let raw: Vec<u8> = (0..3 * BLOCK as u32 - 512)
        .map(|i| (i * i / 7) as u8)
        .collect();
    let one = Bytes::from(&raw[..]);
    let mut other = one.clone();
    assert_eq!((one.to_vec(), hash(&one)), (raw.clone(), hash(&other)));
    let mut part = [0; 5000];
    assert!(one.read(&mut part, 3000) && part[..] == raw[3000..8000]);
    assert!(!one.read(&mut part, raw.len() - 4999));
    assert_eq!(one.sector(BLOCK), Some(&raw[BLOCK..][..SECTOR]));
    assert_eq!(one.sector(raw.len()), None);
    let first = hash(&other);
    other.put_sector(BLOCK, &[9; SECTOR]);
    assert_ne!(hash(&other), first);
    assert_eq!(one.to_vec(), raw);
    other.put_sector(BLOCK, &raw[BLOCK..][..SECTOR]);
    assert_eq!(hash(&other), first);
    // What was cut off does not come back.
    other.resize(BLOCK + 512);
    other.resize(raw.len());
    assert_eq!(other.to_vec()[..BLOCK + 512], raw[..BLOCK + 512]);
    assert!(other.to_vec()[BLOCK + 512..].iter().all(|&byte| byte == 0));
}
