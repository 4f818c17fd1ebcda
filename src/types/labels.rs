//! Enums whose values are known as a list, such as the values of metric labels, and a counter for each value.
//!
//! [`listed!`](crate::listed!) and [`labels!`](crate::labels!) write the list from the variants. A new variant is
//! therefore counted and shown, or it does not compile.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An enum whose values are known as a list.
pub trait Listed: Copy + Debug + Eq + Send + Sync + 'static {
    /// All values, in the order of their declaration.
    fn values() -> impl Iterator<Item = Self>;

    /// Its place among [`Listed::values`].
    fn index(self) -> usize {
        Self::values().position(|value| value == self).unwrap_or(usize::MAX)
    }
}

/// A [`Listed`] enum whose values are the values of a metric label.
pub trait Labelled: Listed {
    /// The value of the label.
    fn label(self) -> &'static str;
}

/// Declares an enum without data, its list `ALL`, and [`Listed`].
#[macro_export]
macro_rules! listed {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident,)+ }) => {
        $(#[$meta])*
        $vis enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// All values, in the order of their declaration.
            $vis const ALL: [Self; [$(stringify!($variant)),+].len()] = [$(Self::$variant),+];
        }

        impl $crate::labels::Listed for $name {
            fn values() -> impl Iterator<Item = Self> {
                Self::ALL.into_iter()
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

/// Declares an enum and the label of each variant: `Variant => "label",`. After a `;`, variants may hold another
/// [`Labelled`] enum, whose labels they have. Without them, the enum has a list `ALL`.
#[macro_export]
macro_rules! labels {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident => $label:literal,)+ }) => {
        $crate::listed! {
            $(#[$meta])*
            $vis enum $name { $($(#[$doc])* $variant,)+ }
        }
        $crate::labels! { @label $vis $name { $($variant => $label,)+ } }
    };
    (
        $(#[$meta:meta])* $vis:vis enum $name:ident {
            $($(#[$doc:meta])* $variant:ident => $label:literal,)+ ;
            $($(#[$held_doc:meta])* $holder:ident($held:ident),)+
        }
    ) => {
        $(#[$meta])*
        $vis enum $name { $($(#[$doc])* $variant,)+ $($(#[$held_doc])* $holder($held),)+ }

        impl $crate::labels::Listed for $name {
            fn values() -> impl Iterator<Item = Self> {
                [$(Self::$variant),+].into_iter()$(.chain(<$held as $crate::labels::Listed>::values().map(Self::$holder)))+
            }
        }
        $crate::labels! { @label $vis $name { $($variant => $label,)+ ; $($holder,)+ } }
    };
    (@label $vis:vis $name:ident { $($variant:ident => $label:literal,)+ $(; $($holder:ident,)+)? }) => {
        impl $name {
            /// Its name in metric labels, logs and pages.
            #[must_use]
            $vis const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                    $($(Self::$holder(held) => held.label(),)+)?
                }
            }
        }

        impl $crate::labels::Labelled for $name {
            fn label(self) -> &'static str {
                Self::label(self)
            }
        }
    };
}

/// A counter for each value of `L`.
#[derive(Debug)]
pub struct Counts<L> {
    counts: Box<[AtomicU64]>,
    values: PhantomData<fn(L)>,
}

impl<L: Listed> Default for Counts<L> {
    fn default() -> Self {
        Self { counts: L::values().map(|_| AtomicU64::new(0)).collect(), values: PhantomData }
    }
}

impl<L: Listed> Counts<L> {
    /// Counts one event.
    pub fn count(&self, value: L) {
        self.add(value, 1);
    }

    /// Counts `n` events.
    pub fn add(&self, value: L, n: u64) {
        if let Some(count) = self.counts.get(value.index()) {
            count.fetch_add(n, Relaxed);
        }
    }

    /// Number of events since the start.
    #[must_use]
    pub fn get(&self, value: L) -> u64 {
        self.counts.get(value.index()).map_or(0, |count| count.load(Relaxed))
    }

    /// Number of events of each value, in the order of their declaration.
    pub fn each(&self) -> impl Iterator<Item = (L, u64)> + '_ {
        L::values().zip(&self.counts).map(|(value, count)| (value, count.load(Relaxed)))
    }

    /// Number of all events.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.each().map(|(_, count)| count).sum()
    }
}

impl<L: Labelled> Counts<L> {
    /// Number of events by label, without those that never occurred.
    #[must_use]
    pub fn occurred(&self) -> Vec<(&'static str, u64)> {
        self.each().filter(|(_, count)| *count > 0).map(|(value, count)| (value.label(), count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    labels! {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Inner {
            Left => "left",
            Right => "right",
        }
    }

    labels! {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Outer {
            Plain => "plain",
            Other => "other",
            ;
            Holds(Inner),
        }
    }

    #[test]
    fn every_value_has_its_own_count_and_label() {
        let counts = Counts::<Outer>::default();
        for (index, value) in Outer::values().enumerate() {
            assert_eq!(value.index(), index);
            counts.add(value, 1 + index as u64);
        }
        assert_eq!(counts.occurred(), [("plain", 1), ("other", 2), ("left", 3), ("right", 4)]);
        assert_eq!((counts.get(Outer::Holds(Inner::Left)), counts.sum()), (3, 10));
        assert_eq!(Inner::ALL.map(Inner::label), ["left", "right"]);
        assert_eq!(Counts::<Inner>::default().occurred(), []);
    }
}
