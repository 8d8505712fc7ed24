//! The exits of a virtual machine as figures of a turn, and the write cache that all paths must
//! have.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor::demo::ALL_EXITS;

/// Refuses a path that cannot be compared with others, because its write cache is off.
///
/// # Errors
/// If it is off; the error names the path.
pub fn check_cache(path: &str, backend: &str, write_cache: bool) -> Result<(), CommandError> {
    if write_cache {
        return Ok(());
    }
    Err(CommandError::Failed(format!(
        "{path} on the {backend} disk: its write cache is off and that of the others is on: they \
         cannot be compared"
    )))
}

/// Adds to `figures` those of a request: exits to user space by kind. KVM counts them all if it
/// provides `all`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Turn;

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
}
