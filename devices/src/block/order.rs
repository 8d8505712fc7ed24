//! The ended chains that are published next: all of them, or with IN_ORDER only those whose predecessors have all ended
//! (virtio 1.2, 6: "a device MUST use buffers in the same order in which they have been available").

use std::collections::VecDeque;

use super::tracker::Used;

/// The next batch of a queue's used ring. Kept between batches for its memory.
pub(super) struct UsedBatch {
    used: Vec<Used>,
    /// Chains in the order in which they were taken, each with its answer once it has ended. `None`: any order will do.
    order: Option<VecDeque<(u16, Option<Used>)>>,
}

impl UsedBatch {
    pub(super) fn new(in_order: bool) -> Self {
        Self {
            used: Vec::new(),
            order: in_order.then(VecDeque::new),
        }
    }

    /// Whether no more chains may be taken, because too many wait for one before them: as many as the queue has
    /// descriptors, more than a driver may have in flight.
    pub(super) fn is_full(&self, size: u16) -> bool {
        self.order
            .as_ref()
            .is_some_and(|order| order.len() >= usize::from(size))
    }

    /// The chain that begins at `head` has been taken.
    pub(super) fn taken(&mut self, head: u16) {
        if let Some(order) = &mut self.order {
            order.push_back((head, None));
        }
    }

    /// A chain has been answered. A driver that offers one head twice gets the answers in the order of their ends.
    pub(super) fn push(&mut self, used: Used) {
        let Some(order) = &mut self.order else {
            self.used.push(used);
            return;
        };
        let waiting = order
            .iter_mut()
            .find(|(head, end)| *head == used.head && end.is_none());
        if let Some((_, end)) = waiting {
            *end = Some(used);
        }
        while let Some(&(_, Some(used))) = order.front() {
            self.used.push(used);
            order.pop_front();
        }
    }

    /// The chains that can be published.
    pub(super) fn ready(&self) -> &[Used] {
        &self.used
    }

    /// Removes the ready chains: they have been published, or never will be.
    pub(super) fn clear(&mut self) {
        self.used.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(head: u16) -> Used {
        Used { head, written: 1 }
    }

    fn heads(batch: &mut UsedBatch) -> Vec<u16> {
        let heads = batch.ready().iter().map(|used| used.head).collect();
        batch.clear();
        heads
    }

    #[test]
    fn in_any_order_everything_is_ready() {
        let mut batch = UsedBatch::new(false);
        [3, 1, 2].into_iter().for_each(|head| batch.taken(head));
        batch.push(used(2));
        batch.push(used(3));
        assert_eq!(heads(&mut batch), [2, 3]);
        assert!(heads(&mut batch).is_empty() && !batch.is_full(1));
    }

    #[test]
    fn in_order_a_chain_waits_for_those_before_it() {
        let mut batch = UsedBatch::new(true);
        [3, 1, 2, 1].into_iter().for_each(|head| batch.taken(head));
        assert!(batch.is_full(4) && !batch.is_full(5));
        batch.push(used(2));
        batch.push(used(1));
        assert!(heads(&mut batch).is_empty());
        batch.push(used(3));
        assert_eq!(heads(&mut batch), [3, 1, 2]);
        batch.push(used(1));
        assert_eq!(heads(&mut batch), [1]);
        assert!(!batch.is_full(1));
    }
}
