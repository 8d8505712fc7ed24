//! The expected content of every block of the disk.
//!
//! A block's content is computed from its number and its generation (how often it was written). So
//! a check detects a block in the wrong place, an old version and a torn block. Generation 0 is a
//! block that was never written, and a cleared block was discarded or zeroed: both read as zeroes.

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
    /// Generations in `of_block`, four zero bytes per block. `seed` makes the contents of two disks
    /// differ.
    pub fn new(of_block: Region, seed: u32) -> Self {
        Self { of_block, seed }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        (self.of_block.len() / 4) as u32
    }

    /// Starts the next generation of `block`, and fills `data` with its content.
    pub fn renew(&mut self, block: u32, data: &mut [u8]) {
        let generation = (self.of_block.read::<u32>(block as usize * 4) & !CLEARED) + 1;
        self.of_block.write(block as usize * 4, generation);
        fill(data, self.seed, block, generation);
    }

    /// Expects `block` to read as zeroes from now on.
    pub fn clear(&mut self, block: u32) {
        // The low bits keep the generation, so that the next version is not the first one again.
        let generation = self.of_block.read::<u32>(block as usize * 4);
        self.of_block
            .write(block as usize * 4, generation | CLEARED);
    }

    /// Compares every byte of `data` with the expected content of `block`.
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
