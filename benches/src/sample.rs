//! One measurement of a path to a disk: a job, once.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor::demo::ALL_EXITS;

use crate::matrix::{Matrix, Turn};

/// What was measured, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// The way to the disk, such as `virtio-pci ioeventfd` or `nbd`.
    pub path: String,
    /// The source of the requests, such as `embedded guest` or `fio, Linux`.
    pub load: String,
    /// What keeps the data: `ram` or `wal`.
    pub backend: String,
    /// `randread`, `randwrite+fsync` (a FLUSH after each write), ...
    pub job: String,
    /// Requests in flight in each queue.
    pub iodepth: u32,
    /// Queues, or connections, or threads: as many closed loops of `iodepth` requests.
    pub queues: u32,
    /// The disk's I/O scheduler, if it has one.
    pub scheduler: String,
}

/// A measurement.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What was measured.
    pub point: Point,
    /// Its figures. A key is absent if the path does not have that figure.
    pub turn: Turn,
    /// Whether the disk's write cache was on, according to the path itself.
    pub write_cache: bool,
    /// Whether it ran under emulation, where times mean nothing and only counts do.
    pub emulated: bool,
}

/// Refuses samples that cannot be compared, because the write cache of one path to a backend is off.
///
/// # Errors
/// If there is such a path; the error names it.
pub fn check_caches(samples: &[Sample]) -> Result<(), CommandError> {
    match samples.iter().find(|sample| !sample.write_cache) {
        None => Ok(()),
        Some(Sample { point, .. }) => Err(CommandError::Failed(format!(
            "{} on the {} disk: its write cache is off and that of the others is on: they cannot be compared",
            point.path, point.backend
        ))),
    }
}

/// Adds to `figures` those of a request: exits to user space by kind. KVM counts them all if it provides `all`.
pub fn add_exits(figures: &mut Value, exits: &BTreeMap<String, f64>) {
    if exits.is_empty() {
        return;
    }
    let sum = |which: &dyn Fn(&str) -> bool| -> f64 {
        let user_space = exits.iter().filter(|(kind, _)| *kind != ALL_EXITS);
        user_space
            .filter(|(kind, _)| which(kind))
            .map(|(_, count)| count)
            .sum()
    };
    let is_port = |kind: &str| kind.starts_with("port_");
    figures["mmio_read_exits_per_request"] = json!(sum(&|kind| kind == "mmio_read"));
    figures["mmio_write_exits_per_request"] = json!(sum(&|kind| kind == "mmio_write"));
    figures["port_exits_per_request"] = json!(sum(&is_port));
    figures["other_exits_per_request"] =
        json!(sum(&|kind| !kind.starts_with("mmio_") && !is_port(kind)));
    figures["exits_per_request"] = json!(sum(&|_| true));
    if let Some(all) = exits.get(ALL_EXITS) {
        figures["all_exits_per_request"] = json!(all);
    }
}

/// The samples as a matrix, a row for each name that `row` returns, a side for each path.
pub fn matrix<'a>(
    samples: impl Iterator<Item = &'a Sample>,
    row: impl Fn(&Point) -> String,
) -> Matrix<Point> {
    let mut matrix = Matrix::default();
    for Sample {
        point,
        turn,
        emulated,
        ..
    } in samples
    {
        let side = matrix.push(&row(point), &point.path, point.clone(), turn.clone());
        side.emulated = *emulated;
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_summed_by_kind_and_those_of_kvm_stand_apart() {
        let kinds = [
            ("mmio_write", 2.0),
            ("port_read", 1.0),
            ("halt", 0.5),
            (ALL_EXITS, 9.0),
        ];
        let exits = kinds.map(|(kind, count)| (kind.to_owned(), count)).into();
        let mut figures = json!({});
        add_exits(&mut figures, &exits);
        let turn = Turn(figures);
        let told = ["mmio_read", "mmio_write", "port", "other", "all"]
            .map(|kind| turn.get(&format!("{kind}_exits_per_request")));
        assert_eq!(told, [0.0, 2.0, 1.0, 0.5, 9.0].map(Some));
        assert_eq!(turn.get("exits_per_request"), Some(3.5));
    }

    #[test]
    fn paths_with_different_cache_modes_are_not_compared() {
        let sample = |write_cache| Sample {
            point: Point {
                path: "nbd".to_owned(),
                backend: "wal".to_owned(),
                ..Point::default()
            },
            turn: Turn::default(),
            write_cache,
            emulated: false,
        };
        let error = check_caches(&[sample(true), sample(false)]).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("nbd on the wal disk: its write cache is off"),
            "{error}"
        );
        check_caches(&[sample(true)]).unwrap();
    }
}
