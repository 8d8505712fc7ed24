//! The names of the archive's objects. All can be computed.

/// The object that says which log this is an archive of.
pub(crate) const LOG: &str = "log.json";

/// The folders.
pub(crate) const EPOCHS: &str = "epochs";
pub(crate) const PARTS: &str = "parts";
pub(crate) const BASES: &str = "bases";
pub(crate) const CHUNKS: &str = "chunks";
pub(crate) const LEASES: &str = "leases";
pub(crate) const EXPIRING: &str = "expiring";

/// A part or a base: the number of an epoch, and a number within it, from 1.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub(crate) struct ObjectId {
    pub epoch: u64,
    pub number: u64,
}

impl ObjectId {
    pub(crate) fn next(self) -> Self {
        Self {
            number: self.number + 1,
            ..self
        }
    }
}

/// The claim of an epoch.
pub(crate) fn epoch(number: u64) -> String {
    format!("{EPOCHS}/{number:08}.json")
}

/// A part of the log.
pub(crate) fn part(place: ObjectId) -> String {
    format!("{PARTS}/{:08}/{:010}", place.epoch, place.number)
}

/// The manifest of base images.
pub(crate) fn base(place: ObjectId) -> String {
    format!("{BASES}/{:08}/{:06}", place.epoch, place.number)
}

/// A chunk of an image, by the SHA-256 of its bytes in hex.
pub(crate) fn chunk(hash: &str) -> String {
    format!("{CHUNKS}/{}/{hash}", &hash[..2])
}

/// What a running restore needs; `random` is its number.
pub(crate) fn lease(random: &str) -> String {
    format!("{LEASES}/{random}.json")
}

/// That somebody removes what is too old; `random` is its number.
pub(crate) fn expiring(random: &str) -> String {
    format!("{EXPIRING}/{random}.json")
}

/// The number that ends a name of a claim, a part or a base.
pub(crate) fn number(name: &str) -> Option<u64> {
    let last = name.rsplit('/').next()?;
    last.trim_end_matches(".json").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_their_numbers_do() {
        let place = |epoch, number| ObjectId { epoch, number };
        assert!(part(place(1, 9)) < part(place(1, 10)) && part(place(9, 99)) < part(place(10, 1)));
        assert_eq!(part(place(2, 7)), "parts/00000002/0000000007");
        assert_eq!(number(&part(place(2, 7))), Some(7));
        assert_eq!(number(&epoch(3)), Some(3));
        assert_eq!(number("epochs/notes.txt"), None);
    }
}
