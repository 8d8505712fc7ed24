//! The history of the clients' operations, against which any state of a disk can be judged.
//!
//! Each client has a region of a disk to itself and one operation in flight. So its region has a
//! chain of states, one after each operation. After a power cut the region must be in exactly one
//! of these states, at or after the last acknowledged one. All clients of a log together must be at
//! a prefix of their operations.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::io;

/// A state of a region, and the operation that made it. All clients share one logical clock for the
/// times of the request and the answer. An operation that changes nothing, such as zeroing zeroes,
/// need not reach the disk. It then has the request time of the operation that made the unchanged
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The hash of the region's bytes.
    pub hash: u64,
    pub asked: u64,
    /// `u64::MAX` if the operation never ended.
    pub ended: u64,
}

/// A client's region and its chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// File name of the disk's image.
    pub disk: String,
    /// Offset of the region in the disk, in bytes.
    pub offset: usize,
    /// Length of the region in bytes.
    pub len: usize,
    /// The state before the first operation, and the state after each operation.
    pub states: Vec<State>,
}

impl Chain {
    /// The first and the last state with this hash, among the states from number `from` on.
    pub fn find(&self, from: usize, hash: u64) -> Option<(usize, usize)> {
        let states = self.states.get(from..)?;
        let is = |state: &State| state.hash == hash;
        Some((
            from + states.iter().position(is)?,
            from + states.iter().rposition(is)?,
        ))
    }
}

/// Whether the states found of two clients of a log can belong to one prefix: every operation of
/// `one` that was answered before `other` asked for its last operation must be there.
pub fn in_order(one: &Chain, last: usize, other: &Chain, first: usize) -> bool {
    let asked = other.states[first].asked;
    one.states[last + 1..]
        .iter()
        .all(|state| state.ended > asked)
}

/// All data, besides the log, that is needed to judge a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// `ext4` or `xfs`.
    pub file_system: String,
    /// The seed of the operations.
    pub seed: u64,
    /// The chains of all clients, by their numbers.
    pub chains: Vec<Chain>,
}

/// The hash of a region's bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

impl History {
    /// The history as text: one line for the file system and the seed, then one line per chain.
    pub fn to_text(&self) -> String {
        let mut text = format!("{} {}\n", self.file_system, self.seed);
        for chain in &self.chains {
            let _ = write!(text, "{} {} {}", chain.disk, chain.offset, chain.len);
            for state in &chain.states {
                let State { hash, asked, ended } = state;
                let _ = write!(text, " {hash:x}:{asked:x}:{ended:x}");
            }
            text.push('\n');
        }
        text
    }

    /// Parses the text of [`to_text`](Self::to_text).
    pub fn parse(text: &str) -> io::Result<Self> {
        let state = |word: &str| {
            let mut numbers = word
                .split(':')
                .map(|text| u64::from_str_radix(text, 16).ok());
            Some(State {
                hash: numbers.next()??,
                asked: numbers.next()??,
                ended: numbers.next()??,
            })
        };
        let chain = |line: &str| {
            let mut words = line.split(' ');
            Some(Chain {
                disk: words.next()?.to_owned(),
                offset: words.next()?.parse().ok()?,
                len: words.next()?.parse().ok()?,
                states: words.map(state).collect::<Option<_>>()?,
            })
        };
        let history = || {
            let mut lines = text.lines();
            let (file_system, seed) = lines.next()?.split_once(' ')?;
            Some(Self {
                file_system: file_system.to_owned(),
                seed: seed.parse().ok()?,
                chains: lines.map(chain).collect::<Option<_>>()?,
            })
        };
        history().ok_or_else(|| io::Error::other("no history"))
    }
}

/// A mark in the log of dm-log-writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Power cuts from here on are judged.
    Begin,
    /// A client got an answer that makes its state of this number durable.
    Acknowledged { client: usize, state: usize },
    /// A program is about to make a disk, or to give it this size.
    Wanted { disk: String, size: u64 },
    /// The program has reported that the disk is made, or has this size.
    Made { disk: String, size: u64 },
}

impl Mark {
    /// The mark as text without spaces.
    pub fn to_text(&self) -> String {
        match self {
            Self::Begin => "begin".to_owned(),
            Self::Acknowledged { client, state } => format!("ack:{client}:{state}"),
            Self::Wanted { disk, size } => format!("want:{disk}:{size}"),
            Self::Made { disk, size } => format!("made:{disk}:{size}"),
        }
    }

    /// Parses the text of a mark; `None` for a mark that this program did not make.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(':').collect();
        Some(match words[..] {
            ["begin"] => Self::Begin,
            ["ack", client, state] => Self::Acknowledged {
                client: client.parse().ok()?,
                state: state.parse().ok()?,
            },
            ["want", disk, size] => Self::Wanted {
                disk: disk.to_owned(),
                size: size.parse().ok()?,
            },
            ["made", disk, size] => Self::Made {
                disk: disk.to_owned(),
                size: size.parse().ok()?,
            },
            _ => return None,
        })
    }
}

/// The promises about one disk at the time of the power cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promise {
    /// Its size, once a program has reported that the disk is made.
    pub size: Option<u64>,
    /// The size that a program was giving it.
    pub wanted: Option<u64>,
    /// The smallest size that a program has reported: bytes beyond it are lost for good.
    pub smallest: Option<u64>,
}

/// All promises at the time of the power cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// The last acknowledged state of each client that has one.
    pub acknowledged: HashMap<usize, usize>,
    /// The promise about each disk, by the name of its image.
    pub disks: BTreeMap<String, Promise>,
}

impl Promises {
    /// The promises that these marks make.
    pub fn of(marks: impl Iterator<Item = Mark>) -> Self {
        let mut promises = Self::default();
        for mark in marks {
            match mark {
                Mark::Begin => {}
                Mark::Acknowledged { client, state } => {
                    let last = promises.acknowledged.entry(client).or_default();
                    *last = state.max(*last);
                }
                Mark::Wanted { disk, size } => {
                    promises.disks.entry(disk).or_default().wanted = Some(size);
                }
                Mark::Made { disk, size } => {
                    let promise = promises.disks.entry(disk).or_default();
                    (promise.size, promise.wanted) = (Some(size), None);
                    promise.smallest = Some(promise.smallest.map_or(size, |least| least.min(size)));
                }
            }
        }
        promises
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of states, each given as its hash, its request time and its end time.
    fn chain(states: &[(u64, u64, u64)]) -> Chain {
        let states = states
            .iter()
            .map(|&(hash, asked, ended)| State { hash, asked, ended });
        Chain {
            disk: "a.img".to_owned(),
            offset: 4096,
            len: 512,
            states: states.collect(),
        }
    }

    #[test]
    fn a_state_is_found_behind_the_last_acknowledged_and_orders_what_others_did() {
        let one = chain(&[(5, 0, 0), (6, 1, 2), (5, 4, 7)]);
        assert_eq!(one.find(0, 5), Some((0, 2)));
        assert_eq!(one.find(1, 5), Some((2, 2)));
        assert_eq!(one.find(2, 6), None);
        let other = chain(&[(1, 0, 0), (2, 3, 5), (3, 8, 9)]);
        // The other's second operation was requested after this chain's first operation had ended,
        // and before its second had.
        assert!(!in_order(&one, 0, &other, 1) && in_order(&one, 1, &other, 1));
        assert!(!in_order(&one, 1, &other, 2) && in_order(&one, 2, &other, 2));
        assert!(in_order(&one, 0, &other, 0));
    }

    #[test]
    fn history_and_marks_come_back_from_their_text() {
        let history = History {
            file_system: "xfs".to_owned(),
            seed: 7,
            chains: vec![
                chain(&[(1, 0, 0), (u64::MAX, 3, u64::MAX)]),
                chain(&[(7, 0, 0)]),
            ],
        };
        assert_eq!(History::parse(&history.to_text()).unwrap(), history);
        let (disk, size) = ("b.img".to_owned(), 512);
        for mark in [
            Mark::Begin,
            Mark::Acknowledged {
                client: 3,
                state: 9,
            },
            Mark::Wanted {
                disk: disk.clone(),
                size,
            },
            Mark::Made { disk, size },
        ] {
            assert_eq!(Mark::parse(&mark.to_text()), Some(mark));
        }
        assert_eq!(Mark::parse("dm-log-writes-end"), None);
    }

    #[test]
    fn a_promise_is_the_last_one_and_the_smallest_size_is_kept() {
        let made = |size| Mark::Made {
            disk: "a".to_owned(),
            size,
        };
        let wanted = Mark::Wanted {
            disk: "a".to_owned(),
            size: 6,
        };
        let acknowledged = |state| Mark::Acknowledged { client: 1, state };
        let marks = [made(4), acknowledged(2), made(2), acknowledged(5), wanted];
        let promises = Promises::of(marks.into_iter());
        assert_eq!(promises.acknowledged, HashMap::from([(1, 5)]));
        let promise = &promises.disks["a"];
        let sizes = (promise.size, promise.wanted, promise.smallest);
        assert_eq!(sizes, (Some(2), Some(6), Some(2)));
    }
}
