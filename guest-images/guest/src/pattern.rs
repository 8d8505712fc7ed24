//! What every block of the disk must read as.
//!
//! A block's content follows from its number and its generation (how often it was written), so that a block
//! in the wrong place, an old version or a torn one is told from the right one. Generation 0 is a block that
//! was never written or was discarded: zeroes.

use crate::contract::mix;
use crate::error::Error;
use crate::memory::Region;

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// The generation of every block of the disk's tested part.
#[derive(Debug)]
pub struct Generations {
    of_block: Region,
    seed: u32,
}

impl Generations {
    /// Over `of_block`, four bytes a block, all zero. `seed` makes two disks differ.
    pub fn new(of_block: Region, seed: u32) -> Self {
        Self { of_block, seed }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        (self.of_block.len() / 4) as u32
    }

    /// Fills `data` with what block `block` is to hold from now on.
    pub fn renew(&mut self, block: u32, data: &mut [u8]) {
        let generation = (self.of_block.read::<u32>(block as usize * 4) & !CLEARED) + 1;
        self.of_block.write(block as usize * 4, generation);
        fill(data, self.seed, block, generation);
    }

    /// From now on `block` reads as zeroes.
    pub fn clear(&mut self, block: u32) {
        // The count of versions goes on in the low bits: what comes back later is not the first version.
        let generation = self.of_block.read::<u32>(block as usize * 4);
        self.of_block
            .write(block as usize * 4, generation | CLEARED);
    }

    /// Compares every byte of `data` with what `block` must read as.
    ///
    /// # Errors
    /// [`Error::Content`] with the first byte that differs.
    pub fn check(&self, block: u32, data: &[u8]) -> Result<(), Error> {
        let generation = self.of_block.read::<u32>(block as usize * 4);
        for (index, word) in data.chunks_exact(8).enumerate() {
            let expected = expected_word(self.seed, block, generation, index).to_le_bytes();
            if word == expected {
                continue;
            }
            let differs = word
                .iter()
                .zip(expected)
                .position(|(&found, byte)| found != byte);
            let at = differs.unwrap_or(0);
            return Err(Error::Content {
                block,
                offset: index * 8 + at,
                expected: expected[at],
                found: word[at],
            });
        }
        Ok(())
    }
}

const CLEARED: u32 = 1 << 31;

fn fill(data: &mut [u8], seed: u32, block: u32, generation: u32) {
    for (index, word) in data.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&expected_word(seed, block, generation, index).to_le_bytes());
    }
}

fn expected_word(seed: u32, block: u32, generation: u32, index: usize) -> u64 {
    if generation == 0 || generation & CLEARED != 0 {
        return 0;
    }
    let place = u64::from(seed) << 56 ^ u64::from(block) << 32 ^ u64::from(generation) << 10;
    mix(place ^ index as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::arena;

    fn generations() -> Generations {
        Generations::new(arena(4096).take(32, 8).unwrap(), 1)
    }

    #[test]
    fn a_block_reads_as_its_newest_version_only() {
        let mut generations = generations();
        let mut old = vec![0; BLOCK];
        let mut new = vec![0; BLOCK];
        assert_eq!(generations.check(3, &old), Ok(()));
        generations.renew(3, &mut old);
        assert_eq!(generations.check(3, &old), Ok(()));
        assert!(
            generations.check(2, &old).is_err(),
            "the right content in the wrong place"
        );
        generations.renew(3, &mut new);
        assert!(generations.check(3, &old).is_err(), "an old version");
        // Torn: the first half new, the second half old.
        let torn = [&new[..BLOCK / 2], &old[BLOCK / 2..]].concat();
        assert!(matches!(
            generations.check(3, &torn),
            Err(Error::Content {
                block: 3,
                offset: 2048..2056,
                ..
            })
        ));
        generations.clear(3);
        assert!(
            generations.check(3, &new).is_err(),
            "discarded, but still there"
        );
        assert_eq!(generations.check(3, &[0; BLOCK]), Ok(()));
        generations.renew(3, &mut old);
        assert_eq!(generations.check(3, &old), Ok(()));
        assert!(
            generations.check(3, &new).is_err(),
            "what was there before the discard"
        );
    }

    #[test]
    fn one_wrong_bit_is_named() {
        let mut generations = generations();
        let mut data = vec![0; BLOCK];
        generations.renew(1, &mut data);
        data[77] ^= 0x10;
        let found = data[77];
        let expected = found ^ 0x10;
        assert_eq!(
            generations.check(1, &data),
            Err(Error::Content {
                block: 1,
                offset: 77,
                expected,
                found
            })
        );
    }
}
